/* Ordinary frames and replies of `common/nats/protocol.py`, built by `make native`.
 *
 * Whatever is not ordinary (a protocol line, a frame that is not whole, malformed or without a sink, a reply of another
 * form) stays where it is: the Python code continues there, with its own errors. So this file only has to recognise what
 * it is sure of, and both give the same results.
 *
 * Nothing is read beyond the end of the bytes. Sizes have so few digits that no sum overflows. The caller holds all
 * objects that are read; a sink, which may remove itself, is held while it is called.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

#ifndef SOURCE_SHA256 /* of this file: Python uses no module that was built from another one */
#define SOURCE_SHA256 ""
#endif
#define MAX_SIZE_DIGITS 7 /* far below the largest message that the Python code accepts */
#define MAX_NUMBER_DIGITS 19
#define MAX_WORDS 6 /* HMSG subject sid reply header-size size */

/* Bytes of another object. */
typedef struct {
    const char *at;
    Py_ssize_t length;
} Text;

static PyObject *bytes_of(Text text) { return PyBytes_FromStringAndSize(text.at, text.length); }

static int equals(Text text, const char *other, Py_ssize_t length) {
    return text.length == length && memcmp(text.at, other, (size_t)length) == 0;
}

/* The number that the text is, of at most `most` ASCII digits; -1 for any other text. */
static long long number_of(Text text, int most) {
    unsigned long long value = 0; /* holds 19 digits, which a signed one may not */
    if (text.length < 1 || text.length > most) return -1;
    for (Py_ssize_t i = 0; i < text.length; i++) {
        unsigned digit = (unsigned)(unsigned char)text.at[i] - '0';
        if (digit > 9) return -1;
        value = value * 10 + digit;
    }
    return value > LLONG_MAX ? -1 : (long long)value;
}

/* MessageList: as the class of this name in protocol.py */

typedef struct {
    PyObject_HEAD
    PyObject *lists[4];  /* subjects, replies, payloads, headers */
    PyObject *on_first, *on_status;
} MessageList;

static PyTypeObject MessageListType;

static int list_traverse(MessageList *self, visitproc visit, void *arg) {
    for (int i = 0; i < 4; i++) Py_VISIT(self->lists[i]);
    Py_VISIT(self->on_first);
    Py_VISIT(self->on_status);
    return 0;
}

static int list_clear(MessageList *self) {
    for (int i = 0; i < 4; i++) Py_CLEAR(self->lists[i]);
    Py_CLEAR(self->on_first);
    Py_CLEAR(self->on_status);
    return 0;
}

static void list_dealloc(MessageList *self) {
    PyObject_GC_UnTrack(self);
    list_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *list_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *on_first, *on_status;
    static char *names[] = {"on_first", "on_status", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO", names, &on_first, &on_status)) return NULL;
    MessageList *self = (MessageList *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->on_first = Py_NewRef(on_first);
    self->on_status = Py_NewRef(on_status);
    for (int i = 0; i < 4; i++) {
        if ((self->lists[i] = PyList_New(0)) == NULL) {
            Py_DECREF(self);
            return NULL;
        }
    }
    return (PyObject *)self;
}

/* Return -1 with an exception; if memory ran out, the lists are as before. `headers`: None if there are none. */
static int list_add(MessageList *self, PyObject *subject, PyObject *reply, PyObject *payload, PyObject *headers) {
    PyObject *values[4] = {subject, reply, payload, headers};
    Py_ssize_t count = PyList_GET_SIZE(self->lists[0]);
    for (int i = 0; i < 4; i++) {
        if (PyList_Append(self->lists[i], values[i]) < 0) {
            while (i-- > 0) PyList_SetSlice(self->lists[i], count, count + 1, NULL);
            return -1;
        }
    }
    if (count > 0) return 0;
    PyObject *done = PyObject_CallNoArgs(self->on_first);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static int list_status(MessageList *self, PyObject *headers) {
    PyObject *done = PyObject_CallOneArg(self->on_status, headers);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *list_call(MessageList *self, PyObject *args, PyObject *kwargs) {
    PyObject *subject, *reply, *payload, *headers;
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "MessageList takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "SSSO", &subject, &reply, &payload, &headers)) return NULL;
    int failed = PyBytes_GET_SIZE(reply) ? list_add(self, subject, reply, payload, headers) : list_status(self, headers);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *list_take(MessageList *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *fresh[4] = {NULL, NULL, NULL, NULL}, *taken = PyTuple_New(4);
    int failed = taken == NULL;
    for (int i = 0; i < 4 && !failed; i++) failed = (fresh[i] = PyList_New(0)) == NULL;
    for (int i = 0; i < 4; i++) {
        if (failed) {
            Py_XDECREF(fresh[i]);
        } else {
            PyTuple_SET_ITEM(taken, i, self->lists[i]);
            self->lists[i] = fresh[i];
        }
    }
    if (failed) Py_CLEAR(taken);
    return taken;
}

static PyMethodDef list_methods[] = {
    {"take", (PyCFunction)list_take, METH_NOARGS, "Return the lists of subjects, replies, payloads and headers, and keep empty ones."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject MessageListType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "common.nats._frames.MessageList",
    .tp_doc = "As protocol.MessageList.",
    .tp_basicsize = sizeof(MessageList),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = list_new,
    .tp_dealloc = (destructor)list_dealloc,
    .tp_traverse = (traverseproc)list_traverse,
    .tp_clear = (inquiry)list_clear,
    .tp_call = (ternaryfunc)list_call,
    .tp_methods = list_methods,
};

/* Frames */

typedef struct {
    Text words[MAX_WORDS];
    int has_headers, has_reply;
    const char *start, *body, *stop; /* of the header block, of the payload; end of the payload */
} Frame;

/* Read the frame at `at`. Return the place after it; NULL if no whole, ordinary one is there. */
static const char *read_frame(const char *at, const char *end, Frame *frame) {
    if (end - at < 5) return NULL;
    frame->has_headers = *at == 'H';
    if (memcmp(at, frame->has_headers ? "HMSG " : "MSG ", frame->has_headers ? 5 : 4) != 0) return NULL;
    const char *line_end = memchr(at, '\n', (size_t)(end - at));
    if (line_end == NULL || line_end[-1] != '\r') return NULL;
    const char *line_stop = line_end - 1;
    int count = 0;
    for (const char *word = at; word <= line_stop;) {
        const char *stop = memchr(word, ' ', (size_t)(line_stop - word));
        if (stop == NULL) stop = line_stop;
        if (stop == word || count == MAX_WORDS) return NULL;
        frame->words[count++] = (Text){word, stop - word};
        word = stop + 1;
    }
    int least = frame->has_headers ? 5 : 4;
    if (count != least && count != least + 1) return NULL;
    frame->has_reply = count == least + 1;
    long long size = number_of(frame->words[count - 1], MAX_SIZE_DIGITS);
    long long header_size = frame->has_headers ? number_of(frame->words[count - 2], MAX_SIZE_DIGITS) : 0;
    frame->start = line_end + 1;
    if (size < 0 || header_size < 0 || header_size > size || end - frame->start < size + 2) return NULL;
    frame->body = frame->start + header_size;
    frame->stop = frame->start + size;
    if (frame->stop[0] != '\r' || frame->stop[1] != '\n') return NULL;
    return frame->stop + 2;
}

/* Pass a message to its sink. Return -1 with the exception of the sink, or without memory. */
static int deliver(PyObject *sink, const Frame *frame) {
    PyObject *subject = bytes_of(frame->words[1]);
    PyObject *reply = frame->has_reply ? bytes_of(frame->words[3]) : PyBytes_FromStringAndSize(NULL, 0);
    PyObject *payload = bytes_of((Text){frame->body, frame->stop - frame->body});
    PyObject *headers = frame->has_headers ? bytes_of((Text){frame->start, frame->body - frame->start}) : Py_NewRef(Py_None);
    int failed = subject == NULL || reply == NULL || payload == NULL || headers == NULL;
    if (!failed && Py_IS_TYPE(sink, &MessageListType)) {
        MessageList *list = (MessageList *)sink;
        failed = frame->has_reply ? list_add(list, subject, reply, payload, headers) : list_status(list, headers);
    } else if (!failed) {
        PyObject *args[4] = {subject, reply, payload, headers};
        PyObject *done = PyObject_Vectorcall(sink, args, 4, NULL);
        failed = done == NULL;
        Py_XDECREF(done);
    }
    Py_XDECREF(subject);
    Py_XDECREF(reply);
    Py_XDECREF(payload);
    Py_XDECREF(headers);
    return failed ? -1 : 0;
}

/* Pass the error of a sink to `on_sink_error`. Return -1 with an exception if it is no Exception, or if that raises. */
static int report(PyObject *on_sink_error, PyObject *sid) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL) PyException_SetTraceback(error, trace);
    PyObject *done = PyObject_CallFunctionObjArgs(on_sink_error, sid, error, NULL);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *take_frames(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *data, *sinks, *on_sink_error, *sid = NULL;
    Py_ssize_t position;
    if (!PyArg_ParseTuple(args, "SnO!O", &data, &position, &PyDict_Type, &sinks, &on_sink_error)) return NULL;
    const char *begin = PyBytes_AS_STRING(data), *end = begin + PyBytes_GET_SIZE(data), *at = begin;
    if (position < 0 || position > end - begin) {
        PyErr_SetString(PyExc_ValueError, "position: expected one within the bytes");
        return NULL;
    }
    at += position;
    Frame frame;
    for (const char *next; (next = read_frame(at, end, &frame)) != NULL; at = next) {
        Text word = frame.words[2];
        /* Most frames of a burst are of one subscription. */
        if (sid == NULL || !equals(word, PyBytes_AS_STRING(sid), PyBytes_GET_SIZE(sid))) {
            Py_XSETREF(sid, bytes_of(word));
            if (sid == NULL) return NULL;
        }
        PyObject *sink = Py_XNewRef(PyDict_GetItemWithError(sinks, sid)); /* the sink may remove itself */
        if (sink == NULL) break;
        int failed = deliver(sink, &frame) < 0 && report(on_sink_error, sid) < 0;
        Py_DECREF(sink);
        if (failed) break;
    }
    Py_XDECREF(sid);
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(at - begin);
}

/* Replies */

#define PLAIN_WORDS 9 /* $JS.ACK.STREAM.CONSUMER.DELIVERIES.SEQUENCE.NUMBER.TIMESTAMP.PENDING */
#define DOMAIN_WORDS 11 /* $JS.ACK.DOMAIN.ACCOUNT.STREAM. and so on, in some versions with a last word more */

/* Split `text` at dots; return the number of words, `most + 1` if there are more than `most`. */
static int split_words(Text text, Text *words, int most) {
    const char *at = text.at, *end = at + text.length;
    for (int count = 0; count < most; count++) {
        const char *stop = memchr(at, '.', (size_t)(end - at));
        words[count] = (Text){at, (stop == NULL ? end : stop) - at};
        if (stop == NULL) return count + 1;
        at = stop + 1;
    }
    return most + 1;
}

static PyObject *read_replies(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *replies, *consumer, *sequences, *times;
    long long first, before = -1;
    if (!PyArg_ParseTuple(args, "OSL", &replies, &consumer, &first)) return NULL;
    if (!PyList_CheckExact(replies) || PyList_GET_SIZE(replies) == 0) Py_RETURN_NONE;
    Py_ssize_t count = PyList_GET_SIZE(replies), contiguous = 0;
    int length = 0;
    sequences = PyList_New(count);
    times = PyList_New(count);
    if (sequences == NULL || times == NULL) goto failed;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *reply = PyList_GET_ITEM(replies, i);
        Text words[DOMAIN_WORDS + 1];
        if (!PyBytes_CheckExact(reply)) goto other;
        int found = split_words((Text){PyBytes_AS_STRING(reply), PyBytes_GET_SIZE(reply)}, words, DOMAIN_WORDS + 1);
        if (i == 0) length = found;
        if (found != length || (found != PLAIN_WORDS && found != DOMAIN_WORDS && found != DOMAIN_WORDS + 1)) goto other;
        const Text *own = words + (found == PLAIN_WORDS ? 2 : 4);
        if (!equals(words[0], "$JS", 3) || !equals(words[1], "ACK", 3)) goto other;
        if (!equals(own[1], PyBytes_AS_STRING(consumer), PyBytes_GET_SIZE(consumer))) goto other;
        long long sequence = number_of(own[3], MAX_NUMBER_DIGITS), number = number_of(own[4], MAX_NUMBER_DIGITS);
        long long time = number_of(own[5], MAX_NUMBER_DIGITS);
        if (sequence <= before || number < 0 || time < 0) goto other;
        before = sequence;
        /* Unsigned: `first` plus `i` may be above the largest number, and is then equal to none. */
        if (contiguous == i && (unsigned long long)number == (unsigned long long)first + (unsigned long long)i) contiguous++;
        PyObject *value = PyLong_FromLongLong(sequence);
        if (value == NULL) goto failed;
        PyList_SET_ITEM(sequences, i, value);
        if ((value = PyLong_FromLongLong(time)) == NULL) goto failed;
        PyList_SET_ITEM(times, i, value);
    }
    return Py_BuildValue("NNn", sequences, times, contiguous);
other:
    Py_DECREF(sequences);
    Py_DECREF(times);
    Py_RETURN_NONE;
failed:
    Py_XDECREF(sequences);
    Py_XDECREF(times);
    return NULL;
}

static PyMethodDef methods[] = {
    {"take_frames", take_frames, METH_VARARGS, "Pass ordinary frames from `position` on to their sinks; return the place after them."},
    {"read_replies", read_replies, METH_VARARGS, "Return the fields of ParsedReplies; None if a reply is not ordinary."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_frames", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__frames(void) {
    PyObject *module = PyType_Ready(&MessageListType) < 0 ? NULL : PyModule_Create(&definition);
    if (module == NULL || PyModule_AddStringConstant(module, "SOURCE_SHA256", SOURCE_SHA256) < 0 ||
        PyModule_AddObjectRef(module, "MessageList", (PyObject *)&MessageListType) < 0) {
        Py_CLEAR(module);
    }
    return module;
}
