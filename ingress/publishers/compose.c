/* Fast-ingest messages for the wire, as `FastBatch.compose` of `batches.py` makes them; built by `make native`.
 *
 * `compose` takes rows of one prepared batch and returns their bytes. It returns None for rows that are not ordinary (a
 * number below 0, an object of another type, payloads that do not lie in their buffer): the Python code makes these.
 *
 * The first loop checks everything and sums what the rows need at most; the second one writes, and can fail no more.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#ifndef SOURCE_SHA256 /* of this file: Python uses no module that was built from another one */
#define SOURCE_SHA256 ""
#endif
#define MAX_DIGITS 20
/* With fewer rows and shorter texts no sum overflows. */
#define MAX_ROWS (1 << 20)
#define MAX_BYTES (1 << 30)

#define START "HPUB "
#define FLOW ".$FI "
#define BEFORE_EXPECTED "\r\nNATS/1.0\r\nNats-Expected-Last-Sequence: "
#define END "\r\n"
#define LENGTH(text) ((Py_ssize_t)sizeof(text) - 1)
/* Bytes of a message beside subject, reply, header lines and payload: five numbers, the operation, two spaces, a dot. */
#define OTHER_BYTES (LENGTH(START) + LENGTH(FLOW) + LENGTH(BEFORE_EXPECTED) + 2 * LENGTH(END) + 4 * MAX_DIGITS + 4)
#define BLOCK_BYTES LENGTH(BEFORE_EXPECTED) /* of the publisher's lines without digits: its first CR LF stands for the last */

typedef struct {
    PyObject *subjects, *sequences, *times, *tails; /* lists; `tails` may be None */
    const int32_t *ends; /* of the payloads in `data`: payload i lies from ends[i] to ends[i + 1] */
    const char *data;
    PyObject *origin, *end, *reply; /* bytes */
} Batch;

static char *put(char *to, const char *from, Py_ssize_t length) {
    memcpy(to, from, (size_t)length);
    return to + length;
}

static char *put_bytes(char *to, PyObject *bytes) { return put(to, PyBytes_AS_STRING(bytes), PyBytes_GET_SIZE(bytes)); }

static char *put_number(char *to, unsigned long long value) {
    char text[MAX_DIGITS];
    int at = MAX_DIGITS;
    do {
        text[--at] = (char)('0' + value % 10);
        value /= 10;
    } while (value != 0);
    return put(to, text + at, MAX_DIGITS - at);
}

static int digits(unsigned long long value) {
    int count = 1;
    while (value >= 10) value /= 10, count++;
    return count;
}

static int is_short(PyObject *value) { return PyBytes_CheckExact(value) && PyBytes_GET_SIZE(value) < MAX_BYTES; }

/* The item as a number; -1 without an exception if it is none from 0 to 2^63 - 1. */
static long long number_at(PyObject *list, Py_ssize_t row) {
    PyObject *item = PyList_GET_ITEM(list, row);
    int overflow = 0;
    if (!PyLong_CheckExact(item)) return -1;
    long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
    return overflow ? -1 : value;
}

/* The tail of a row that has a header block of its own, else NULL. */
static PyObject *tail_at(const Batch *batch, Py_ssize_t row) {
    PyObject *tail = batch->tails == Py_None ? Py_None : PyList_GET_ITEM(batch->tails, row);
    return tail == Py_None || (PyBytes_CheckExact(tail) && PyBytes_GET_SIZE(tail) == 0) ? NULL : tail;
}

/* Bytes that the rows need at most; -1 if one of them is not ordinary. */
static Py_ssize_t bound_of(const Batch *batch, Py_ssize_t row, Py_ssize_t stop, Py_ssize_t data_size) {
    Py_ssize_t bound = 0;
    Py_ssize_t own = PyBytes_GET_SIZE(batch->origin) + PyBytes_GET_SIZE(batch->end) + 2 * MAX_DIGITS + 1;
    for (; row < stop; row++) {
        PyObject *subject = PyList_GET_ITEM(batch->subjects, row), *tail = tail_at(batch, row);
        if (!is_short(subject) || (tail != NULL && !is_short(tail))) return -1;
        if (number_at(batch->sequences, row) < 0 || number_at(batch->times, row) < 0) return -1;
        if (batch->ends[row] < 0 || batch->ends[row + 1] < batch->ends[row] || batch->ends[row + 1] > data_size) return -1;
        bound += PyBytes_GET_SIZE(subject) + PyBytes_GET_SIZE(batch->reply) + (tail ? PyBytes_GET_SIZE(tail) : own);
        bound += batch->ends[row + 1] - batch->ends[row] + OTHER_BYTES;
    }
    return bound;
}

static char *put_rows(
    char *to, const Batch *batch, Py_ssize_t row, Py_ssize_t stop, char operation, long long number, long long last, long long after
) {
    for (; row < stop; row++, number++, after++) {
        PyObject *tail = tail_at(batch, row);
        char own[2 * MAX_DIGITS + 1], *own_end = own;
        if (tail == NULL) {
            own_end = put_number(own, (unsigned long long)number_at(batch->sequences, row));
            *own_end++ = ' ';
            own_end = put_number(own_end, (unsigned long long)number_at(batch->times, row));
        }
        Py_ssize_t lines = tail != NULL ? PyBytes_GET_SIZE(tail)
                                        : PyBytes_GET_SIZE(batch->origin) + (own_end - own) + PyBytes_GET_SIZE(batch->end);
        Py_ssize_t size = BLOCK_BYTES + digits((unsigned long long)after) + lines;
        Py_ssize_t payload = batch->ends[row + 1] - batch->ends[row];
        if (number == last) operation = '2'; /* FINAL */
        to = put_bytes(put(to, START, LENGTH(START)), PyList_GET_ITEM(batch->subjects, row));
        *to++ = ' ';
        to = put_number(put_bytes(to, batch->reply), (unsigned long long)number);
        *to++ = '.';
        *to++ = operation;
        to = put_number(put(to, FLOW, LENGTH(FLOW)), (unsigned long long)size);
        *to++ = ' ';
        to = put_number(to, (unsigned long long)(size + payload));
        to = put_number(put(to, BEFORE_EXPECTED, LENGTH(BEFORE_EXPECTED)), (unsigned long long)after);
        to = put(to, END, LENGTH(END));
        to = tail != NULL ? put_bytes(to, tail)
                          : put_bytes(put(put_bytes(to, batch->origin), own, own_end - own), batch->end);
        to = put(put(to, batch->data + batch->ends[row], payload), END, LENGTH(END));
    }
    return to;
}

static int has_rows(PyObject *list, Py_ssize_t stop) { return PyList_CheckExact(list) && PyList_GET_SIZE(list) >= stop; }

/* compose(subjects, sequences, times, tails, ends, data, offset, origin, end, reply, row, stop, operation, number, last,
 * after): `ends` and `data` are the buffers of a binary array that begins at `offset` of them, the operation is that of the
 * rows before `last`, and `number` and `after` belong to the first row. */
static PyObject *compose(PyObject *Py_UNUSED(module), PyObject *args) {
    Batch batch;
    Py_buffer ends, data;
    Py_ssize_t offset, row, stop;
    long long number, last, after;
    int operation;
    PyObject *made = Py_NewRef(Py_None);
    if (!PyArg_ParseTuple(
            args, "OOOOy*z*nSSSnniLLL", &batch.subjects, &batch.sequences, &batch.times, &batch.tails, &ends, &data, &offset,
            &batch.origin, &batch.end, &batch.reply, &row, &stop, &operation, &number, &last, &after
        )) {
        Py_DECREF(made);
        return NULL;
    }
    int is_ordinary = offset >= 0 && row >= 0 && row <= stop && stop - row <= MAX_ROWS && operation >= 0 && operation <= 9 &&
        number >= 0 && after >= 0 && number <= LLONG_MAX - MAX_ROWS && after <= LLONG_MAX - MAX_ROWS &&
        has_rows(batch.subjects, stop) && has_rows(batch.sequences, stop) && has_rows(batch.times, stop) &&
        (batch.tails == Py_None || has_rows(batch.tails, stop)) && is_short(batch.origin) && is_short(batch.end) &&
        is_short(batch.reply) && (uintptr_t)ends.buf % sizeof(int32_t) == 0 && ends.len / (Py_ssize_t)sizeof(int32_t) - 1 - stop >= offset;
    if (is_ordinary) {
        batch.ends = (const int32_t *)ends.buf + offset;
        batch.data = data.buf != NULL ? data.buf : ""; /* None without any payload */
        Py_ssize_t bound = bound_of(&batch, row, stop, data.len);
        if (bound >= 0) {
            Py_DECREF(made);
            made = PyBytes_FromStringAndSize(NULL, bound);
        }
        if (bound >= 0 && made != NULL) {
            char *begin = PyBytes_AS_STRING(made);
            char *end = put_rows(begin, &batch, row, stop, (char)('0' + operation), number, last, after);
            _PyBytes_Resize(&made, end - begin);
        }
    }
    PyBuffer_Release(&ends);
    PyBuffer_Release(&data);
    return made;
}

static PyMethodDef methods[] = {
    {"compose", compose, METH_VARARGS, "Return the bytes of rows `row` to `stop`; None if one of them is not ordinary."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_compose", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__compose(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddStringConstant(module, "SOURCE_SHA256", SOURCE_SHA256) < 0) Py_CLEAR(module);
    return module;
}
