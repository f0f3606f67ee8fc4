/* Copies that go past the processor's caches.
 *
 * An ordinary copy first reads the memory that it is about to overwrite, and pushes what training works on out of the
 * cache. Streaming stores do neither. libc uses them too, but only for copies larger than the cache; a state is copied
 * leaf by leaf.
 */

#include <Python.h>

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>

enum { LINE = 64, AHEAD = 1024, LEAST = 16 * LINE };

static void stream(char *out, const char *source, size_t nbytes) {
    if (nbytes < LEAST) {
        memcpy(out, source, nbytes);
        return;
    }
    size_t head = -(uintptr_t)out % LINE;
    memcpy(out, source, head);
    out += head;
    source += head;
    nbytes -= head;
    for (; nbytes >= LINE; nbytes -= LINE, out += LINE, source += LINE) {
        _mm_prefetch(source + AHEAD, _MM_HINT_NTA); /* past the end it is ignored */
        for (int at = 0; at < LINE; at += 16)
            _mm_stream_si128((__m128i *)(out + at), _mm_loadu_si128((const __m128i *)(source + at)));
    }
    memcpy(out, source, nbytes);
}

static void drain(void) { _mm_sfence(); }

#else

static void stream(char *out, const char *source, size_t nbytes) { memcpy(out, source, nbytes); }

static void drain(void) {}

#endif

static PyObject *copy_pairs(PyObject *self, PyObject *pairs) {
    (void)self;
    if (!PyList_Check(pairs)) {
        PyErr_SetString(PyExc_TypeError, "a list of (out, source) is wanted");
        return NULL;
    }
    Py_ssize_t count = PyList_Size(pairs), held = 0;
    Py_buffer *buffers = PyMem_Calloc(2 * (size_t)count + 1, sizeof *buffers);
    PyObject *left = PyList_New(0);
    int failed = buffers == NULL || left == NULL;
    if (buffers == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t number = 0; number < count && !failed; number++) {
        PyObject *pair = PyList_GetItem(pairs, number), *out, *source;
        if (pair == NULL || !PyArg_ParseTuple(pair, "OO", &out, &source)) {
            failed = 1;
            break;
        }
        if (PyObject_GetBuffer(out, &buffers[held], PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) == 0) {
            if (PyObject_GetBuffer(source, &buffers[held + 1], PyBUF_C_CONTIGUOUS) == 0) {
                held += 2;
                if (buffers[held - 2].len != buffers[held - 1].len) {
                    PyErr_Format(PyExc_ValueError, "pair %zd: %zd bytes into %zd", number, buffers[held - 1].len,
                                 buffers[held - 2].len);
                    failed = 1;
                }
                continue;
            }
            PyBuffer_Release(&buffers[held]);
        }
        if (!PyErr_ExceptionMatches(PyExc_ValueError) && !PyErr_ExceptionMatches(PyExc_BufferError)) {
            failed = 1;
            break;
        }
        PyErr_Clear(); /* not one run of bytes */
        failed = PyList_Append(left, pair) != 0;
    }
    if (!failed) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t at = 0; at < held; at += 2)
            stream(buffers[at].buf, buffers[at + 1].buf, (size_t)buffers[at].len);
        drain();
        Py_END_ALLOW_THREADS
    }
    while (held > 0)
        PyBuffer_Release(&buffers[--held]);
    PyMem_Free(buffers);
    if (failed) {
        Py_XDECREF(left);
        return NULL;
    }
    return left;
}

static PyMethodDef methods[] = {
    {"copy_pairs", copy_pairs, METH_O,
     "Copies the bytes of each source into its out, without the GIL; returns the pairs that are not runs of bytes."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_stream", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__stream(void) {
    PyObject *made = PyModule_Create(&module), *names = Py_BuildValue("[s]", "copy_pairs");
    if (made != NULL && (names == NULL || PyModule_AddObjectRef(made, "__all__", names) != 0)) {
        Py_DECREF(made);
        made = NULL;
    }
    Py_XDECREF(names);
    return made;
}
