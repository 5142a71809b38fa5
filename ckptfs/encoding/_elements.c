/* Byte planes and differences in one pass over the memory; planes.py and delta.py do the same with numpy.
 *
 *   part(data, out, width)              out gets plane 0 (bytes 0, width, 2 * width ... of data), then plane 1, and so on
 *   join(planes, out)                   the reverse, from as many planes as an element has bytes
 *   difference(raw, base, out, width)   out gets the folded differences of raw to base
 *   restore(out, base, width)           the reverse, in place
 *
 * Elements have 2, 4 or 8 bytes, for differences also 1. All work on whole elements, leave what is behind the last one
 * alone, and let other threads run meanwhile.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

enum { WIDEST = 8 };

/* The loops are left to the compiler, which makes them vector code because the widths are constants. */

#define PART(WIDTH)                                                                                                    \
	static void part##WIDTH(const uint8_t *restrict data, uint8_t *restrict out, Py_ssize_t count)                 \
	{                                                                                                              \
		for (Py_ssize_t at = 0; at < count; at++)                                                              \
			for (int plane = 0; plane < WIDTH; plane++)                                                    \
				out[plane * count + at] = data[at * WIDTH + plane];                                    \
	}

PART(2)
PART(4)
PART(8)

static void join2(const uint8_t *const *planes, uint8_t *restrict out, Py_ssize_t count)
{
	const uint8_t *restrict p0 = planes[0], *restrict p1 = planes[1];
	for (Py_ssize_t at = 0; at < count; at++) {
		out[2 * at] = p0[at];
		out[2 * at + 1] = p1[at];
	}
}

static void join4(const uint8_t *const *planes, uint8_t *restrict out, Py_ssize_t count)
{
	const uint8_t *restrict p0 = planes[0], *restrict p1 = planes[1], *restrict p2 = planes[2], *restrict p3 = planes[3];
	for (Py_ssize_t at = 0; at < count; at++) {
		out[4 * at] = p0[at];
		out[4 * at + 1] = p1[at];
		out[4 * at + 2] = p2[at];
		out[4 * at + 3] = p3[at];
	}
}

static void join8(const uint8_t *const *planes, uint8_t *restrict out, Py_ssize_t count)
{
	for (Py_ssize_t at = 0; at < count; at++)
		for (int plane = 0; plane < 8; plane++)
			out[at * 8 + plane] = planes[plane][at];
}

static PyObject *part(PyObject *module, PyObject *arguments)
{
	Py_buffer data, out;
	int width;
	if (!PyArg_ParseTuple(arguments, "y*w*i:part", &data, &out, &width))
		return NULL;
	Py_ssize_t count = width > 0 ? data.len / width : 0;
	int fits = (width == 2 || width == 4 || width == 8) && out.len >= count * width;
	if (fits) {
		Py_BEGIN_ALLOW_THREADS
		(width == 2 ? part2 : width == 4 ? part4 : part8)(data.buf, out.buf, count);
		Py_END_ALLOW_THREADS
	}
	PyBuffer_Release(&data);
	PyBuffer_Release(&out);
	if (!fits)
		return PyErr_Format(PyExc_ValueError, "elements of %d bytes, or too little room for their planes", width);
	Py_RETURN_NONE;
}

static PyObject *join(PyObject *module, PyObject *arguments)
{
	PyObject *given, *sequence;
	Py_buffer out, planes[WIDEST];
	const uint8_t *starts[WIDEST];
	if (!PyArg_ParseTuple(arguments, "Ow*:join", &given, &out))
		return NULL;
	sequence = PySequence_Fast(given, "planes are a sequence of buffers");
	Py_ssize_t width = sequence ? PySequence_Fast_GET_SIZE(sequence) : 0, held = 0, count = 0;
	int fits = width == 2 || width == 4 || width == 8;
	for (; fits && held < width; held++) {
		if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(sequence, held), &planes[held], PyBUF_SIMPLE) < 0)
			break;
		starts[held] = planes[held].buf;
		if (held == 0)
			count = planes[held].len;
		else if (planes[held].len != count)
			fits = 0;
	}
	fits = fits && out.len / width >= count;
	if (fits && held == width) {
		Py_BEGIN_ALLOW_THREADS
		(width == 2 ? join2 : width == 4 ? join4 : join8)(starts, out.buf, count);
		Py_END_ALLOW_THREADS
	}
	while (held > 0)
		PyBuffer_Release(&planes[--held]);
	PyBuffer_Release(&out);
	Py_XDECREF(sequence);
	if (PyErr_Occurred())
		return NULL;
	if (!fits)
		return PyErr_Format(PyExc_ValueError, "%zd planes, or of different lengths, or too little room for them", width);
	Py_RETURN_NONE;
}

/* A buffer need not be aligned: memcpy of one element is how C says so, and no call is made of it. */

#define DIFFERENCES(BITS)                                                                                              \
	static void difference##BITS(const uint8_t *raw, const uint8_t *base, uint8_t *out, Py_ssize_t bytes)          \
	{                                                                                                              \
		for (Py_ssize_t at = 0; at + BITS / 8 <= bytes; at += BITS / 8) {                                      \
			uint##BITS##_t one, other;                                                                     \
			memcpy(&one, raw + at, sizeof one);                                                            \
			memcpy(&other, base + at, sizeof other);                                                       \
			one -= other;                                                                                  \
			one = (uint##BITS##_t)(one << 1) ^ (uint##BITS##_t)-(one >> (BITS - 1));                       \
			memcpy(out + at, &one, sizeof one);                                                            \
		}                                                                                                      \
	}                                                                                                              \
	static void restore##BITS(uint8_t *restrict out, const uint8_t *restrict base, Py_ssize_t bytes)               \
	{                                                                                                              \
		for (Py_ssize_t at = 0; at + BITS / 8 <= bytes; at += BITS / 8) {                                      \
			uint##BITS##_t folded, other;                                                                  \
			memcpy(&folded, out + at, sizeof folded);                                                      \
			memcpy(&other, base + at, sizeof other);                                                       \
			folded = (uint##BITS##_t)(((folded >> 1) ^ (uint##BITS##_t)-(folded & 1)) + other);            \
			memcpy(out + at, &folded, sizeof folded);                                                      \
		}                                                                                                      \
	}

DIFFERENCES(8)
DIFFERENCES(16)
DIFFERENCES(32)
DIFFERENCES(64)

static int is_width(int width)
{
	return width == 1 || width == 2 || width == 4 || width == 8;
}

static PyObject *difference(PyObject *module, PyObject *arguments)
{
	Py_buffer raw, base, out;
	int width;
	if (!PyArg_ParseTuple(arguments, "y*y*w*i:difference", &raw, &base, &out, &width))
		return NULL;
	int fits = is_width(width) && base.len >= raw.len && out.len >= raw.len;
	if (fits) {
		Py_BEGIN_ALLOW_THREADS
		(width == 1 ? difference8 : width == 2 ? difference16 : width == 4 ? difference32 : difference64)(
			raw.buf, base.buf, out.buf, raw.len);
		Py_END_ALLOW_THREADS
	}
	PyBuffer_Release(&raw);
	PyBuffer_Release(&base);
	PyBuffer_Release(&out);
	if (!fits)
		return PyErr_Format(PyExc_ValueError, "elements of %d bytes, or buffers of different lengths", width);
	Py_RETURN_NONE;
}

static PyObject *restore(PyObject *module, PyObject *arguments)
{
	Py_buffer out, base;
	int width;
	if (!PyArg_ParseTuple(arguments, "w*y*i:restore", &out, &base, &width))
		return NULL;
	int fits = is_width(width) && base.len >= out.len;
	if (fits) {
		Py_BEGIN_ALLOW_THREADS
		(width == 1 ? restore8 : width == 2 ? restore16 : width == 4 ? restore32 : restore64)(
			out.buf, base.buf, out.len);
		Py_END_ALLOW_THREADS
	}
	PyBuffer_Release(&out);
	PyBuffer_Release(&base);
	if (!fits)
		return PyErr_Format(PyExc_ValueError, "elements of %d bytes, or buffers of different lengths", width);
	Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
	{"part", part, METH_VARARGS, "part(data, out, width): the byte planes of data, one after the other"},
	{"join", join, METH_VARARGS, "join(planes, out): elements from their byte planes"},
	{"difference", difference, METH_VARARGS, "difference(raw, base, out, width): the folded differences of elements"},
	{"restore", restore, METH_VARARGS, "restore(out, base, width): elements from their folded differences, in place"},
	{NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_elements", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__elements(void)
{
	return PyModule_Create(&definition);
}
