/* Completes what libfuse and pyfuse3 say to the kernel, so that it reads and writes images itself (FUSE passthrough).
 *
 * Neither knows of passthrough. This module defines fuse_session_mount; loaded with RTLD_GLOBAL before pyfuse3, it is the
 * one that pyfuse3 calls. It mounts as before and then gives libfuse a read and a writev of its own for /dev/fuse
 * (fuse_session_custom_io), which look at ten kinds of messages and let all others pass unchanged:
 *
 *   INIT        the reply accepts what the kernel offers and libfuse does not know
 *   OPEN,       where the upper half of the file handle is not 0, it is a backing id: the operations put it there,
 *   CREATE      and the reply tells the kernel to use that backing file
 *   OPENDIR     the reply lets the kernel keep the names that it is told, and says whether those it has are still right
 *   FALLOCATE,  answered here, on the backing file; never with ENOSYS, which the kernel would remember for the whole mount
 *   LSEEK       (it asks for the next data or hole only; without a backing file Python knows the answer)
 *   FLUSH,      answered here where there is nothing to say, which is nearly always: each close asks, and each file that is
 *   GETXATTR    first written is asked for security.capability. To say so in Python takes several times as long
 *   READ,       without passthrough: where Python says in which image the bytes are, they are read or written there and
 *   WRITE       then, without being copied once more and without a turn of the event loop
 *
 * What may be done with this, and when, is mount/passthrough.py's to say. Everything here runs on the one thread that
 * serves the mount; a process serves one mount (pyfuse3's own rule), hence the one `session`.
 *
 * The messages are those of the kernel's include/uapi/linux/fuse.h, protocol 7.40; they are declared here because the
 * headers of the distributions we build on are older than that.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define FUSE_USE_VERSION 314
#include <fuse_lowlevel.h>

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum {
	OPEN = 14, READ = 15, WRITE = 16, GETXATTR = 22, FLUSH = 25, INIT = 26, OPENDIR = 27, CREATE = 35, FALLOCATE = 43, LSEEK = 46
};

struct in_header {
	uint32_t len, opcode;
	uint64_t unique, nodeid;
	uint32_t uid, gid, pid;
	uint16_t total_extlen, padding;
};

struct out_header {
	uint32_t len;
	int32_t error;
	uint64_t unique;
};

struct init_in {
	uint32_t major, minor, max_readahead, flags, flags2;
};

struct init_out {
	uint32_t major, minor, max_readahead, flags;
	uint16_t max_background, congestion_threshold;
	uint32_t max_write, time_gran;
	uint16_t max_pages, map_alignment;
	uint32_t flags2, max_stack_depth;
};

struct open_out {
	uint64_t fh;
	uint32_t open_flags;
	int32_t backing_id;
};

struct fallocate_in {
	uint64_t fh, offset, length;
	uint32_t mode, padding;
};

struct lseek_in {
	uint64_t fh, offset;
	uint32_t whence, padding;
};

struct flush_in {
	uint64_t fh;
	uint32_t unused, padding;
	uint64_t lock_owner;
};

struct transfer_in { /* fuse_read_in, and fuse_write_in, which the bytes follow */
	uint64_t fh, offset;
	uint32_t size, transfer_flags;
	uint64_t lock_owner;
	uint32_t flags, padding;
};

struct write_out {
	uint32_t size, padding;
};

struct getxattr_in {
	uint32_t size, padding;
	char name[];
};

struct backing_map {
	int32_t fd;
	uint32_t flags;
	uint64_t padding;
};

#define ENTRY_OUT_SIZE 128 /* struct fuse_entry_out, which precedes open_out in the reply to CREATE */

#define AUTO_INVAL_DATA (1u << 12)
#define INIT_EXT (1u << 30)
#define KILLPRIV_V2 (1ull << 28)
#define DIRECT_IO_MMAP (1ull << 36)
#define PASSTHROUGH (1ull << 37)

#define FOPEN_KEEP_CACHE (1u << 1)
#define FOPEN_CACHE_DIR (1u << 3)
#define FOPEN_PASSTHROUGH (1u << 7)

#define BACKING_OPEN _IOW(229, 1, struct backing_map)
#define BACKING_CLOSE _IOW(229, 2, uint32_t)

#define STREAM_S 0.002      /* so long reads and writes are served one after another before the event loop has its turn ... */
#define STREAM_WAITS_MS 1   /* ... and so long the next of them is waited for */

#define MOST_AWAITED 4096 /* many more than pyfuse3's max_tasks: each task has one request under way */

static struct {
	int device;                /* -1 until mounted */
	uint64_t wanted;           /* INIT flags that the operations can do with */
	uint64_t offered, agreed;  /* INIT flags of the kernel, and those of them that were accepted */
	struct {
		uint64_t unique;
		uint32_t opcode;
	} awaited[MOST_AWAITED];   /* requests whose replies are to be completed */
	int awaiting;
	struct {
		int32_t id;
		int fd;
	} *backing;                /* registered files; FALLOCATE and LSEEK look here */
	int backings, room;
	PyObject *operations;      /* who is asked about files that are not among them (see answer_with), or NULL */
	char *bytes;               /* of the last READ; room for as many as one ever asked for */
	size_t bytes_room;
} session = { .device = -1 };

/* What the operations' method of this name returns, a number or a truth; *failed* when it raises, which goes to stderr. */
static int64_t ask(const char *method, int64_t failed, const char *format, ...)
{
	va_list arguments;
	va_start(arguments, format);
	PyObject *answer = NULL, *asked = PyObject_GetAttrString(session.operations, method);
	PyObject *values = asked ? Py_VaBuildValue(format, arguments) : NULL;
	va_end(arguments);
	if (values)
		answer = PyObject_CallObject(asked, values);
	int64_t said = answer ? PyLong_AsLongLong(answer) : failed;
	if (PyErr_Occurred()) {
		PyErr_WriteUnraisable(asked);
		said = failed;
	}
	Py_XDECREF(answer);
	Py_XDECREF(values);
	Py_XDECREF(asked);
	return said;
}

/* Backing files */

static int backing_descriptor(int32_t id)
{
	for (int at = 0; at < session.backings; at++)
		if (session.backing[at].id == id)
			return session.backing[at].fd;
	return -1;
}

/* 0 or the negative errno. The descriptor that was registered is read-only, so that it is no writer itself (see
 * passthrough.py); a writable one exists only during the call. */
static int allocate(const struct fallocate_in *wanted)
{
	int fd = backing_descriptor(wanted->fh >> 32);
	if (fd < 0)
		return -EOPNOTSUPP;
	char path[32];
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	int writable = open(path, O_WRONLY | O_CLOEXEC);
	if (writable < 0)
		return -errno;
	int error = fallocate(writable, wanted->mode, wanted->offset, wanted->length) ? -errno : 0;
	close(writable);
	return error;
}

/* The same for lseek, of which nothing but SEEK_DATA and SEEK_HOLE reaches us: the offset, or the negative errno. */
static int64_t seek(const struct lseek_in *wanted)
{
	int fd = backing_descriptor(wanted->fh >> 32);
	if (fd >= 0) { /* nobody else uses the position of this descriptor */
		off_t found = lseek(fd, wanted->offset, wanted->whence);
		return found < 0 ? -errno : found;
	}
	return ask("seek", -EIO, "(KKI)", (unsigned long long)wanted->fh, (unsigned long long)wanted->offset,
		   (unsigned)wanted->whence);
}

static int asks_for_capabilities(const struct in_header *header, const struct getxattr_in *wanted)
{
	static const char name[] = "security.capability";
	return header->len == sizeof(*header) + sizeof(*wanted) + sizeof(name) && !memcmp(wanted->name, name, sizeof(name));
}

/* Messages */

/* Returns 1: it is answered. */
static int answer(int fd, uint64_t unique, int error, void *body, size_t size)
{
	struct out_header header = { sizeof(header) + (error ? 0 : size), error, unique };
	struct iovec parts[] = { { &header, sizeof(header) }, { body, size } };
	if (writev(fd, parts, error || !size ? 1 : 2) < 0 && errno != ENOENT) /* ENOENT: nobody waits for it any more */
		perror("ckptfs: an answer to the kernel");
	return 1;
}

static double seconds_now(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec + now.tv_nsec * 1e-9;
}

/* READ of bytes that are in an image. 0 where it is a request like any other. */
static int serve_read(int fd, uint64_t unique, const struct transfer_in *wanted)
{
	int image = ask("to_read", -1, "(KKI)", (unsigned long long)wanted->fh, (unsigned long long)wanted->offset,
			wanted->size);
	if (image < 0)
		return 0;
	if (session.bytes_room < wanted->size) {
		char *larger = PyMem_RawRealloc(session.bytes, wanted->size);
		if (!larger)
			return 0;
		session.bytes = larger;
		session.bytes_room = wanted->size;
	}
	ssize_t got;
	Py_BEGIN_ALLOW_THREADS
	got = pread(image, session.bytes, wanted->size, wanted->offset);
	Py_END_ALLOW_THREADS
	if (got < 0)
		return 0; /* tried again by the operations, who tell */
	return answer(fd, unique, 0, session.bytes, got);
}

/* WRITE into an image that needs no preparation. What is not written whole, or not booked, is written once more by the
 * operations, to the same place: they know what to do about a full disk, and whom to tell. */
static int serve_write(int fd, uint64_t unique, const struct transfer_in *wanted)
{
	int image = ask("to_write", -1, "(K)", (unsigned long long)wanted->fh);
	if (image < 0)
		return 0;
	const char *bytes = (const char *)(wanted + 1);
	size_t written = 0;
	double started = seconds_now();
	Py_BEGIN_ALLOW_THREADS
	while (written < wanted->size) {
		ssize_t more = pwrite(image, bytes + written, wanted->size - written, wanted->offset + written);
		if (more <= 0)
			break;
		written += more;
	}
	Py_END_ALLOW_THREADS
	if (written < wanted->size)
		return 0;
	if (!ask("wrote", 0, "(KKd)", (unsigned long long)wanted->fh, (unsigned long long)wanted->offset,
		 seconds_now() - started))
		return 0;
	struct write_out out = { written, 0 };
	return answer(fd, unique, 0, &out, sizeof(out));
}

/* Whether a request was answered here. */
static int serve(int fd, const struct in_header *header)
{
	const void *body = header + 1;
	if (header->opcode == FALLOCATE)
		return answer(fd, header->unique, allocate(body), NULL, 0);
	if (!session.operations)
		return 0;
	switch (header->opcode) {
	case LSEEK: {
		int64_t found = seek(body);
		return answer(fd, header->unique, found < 0 ? (int)found : 0, &found, sizeof(found));
	}
	case FLUSH:
		return ask("is_sound", 0, "(K)", (unsigned long long)((const struct flush_in *)body)->fh)
		       && answer(fd, header->unique, 0, NULL, 0);
	case GETXATTR:
		return asks_for_capabilities(header, body) && ask("is_plain", 0, "(K)", (unsigned long long)header->nodeid)
		       && answer(fd, header->unique, -ENODATA, NULL, 0);
	case READ:
		return serve_read(fd, header->unique, body);
	case WRITE:
		return serve_write(fd, header->unique, body);
	}
	return 0;
}

/* Whether another request comes at once. Who reads or writes a file in order sends one as soon as it has its answer. */
static int another_comes(int fd)
{
	struct pollfd device = { fd, POLLIN, 0 };
	int found;
	Py_BEGIN_ALLOW_THREADS
	found = poll(&device, 1, STREAM_WAITS_MS);
	Py_END_ALLOW_THREADS
	return found == 1 && device.revents & POLLIN;
}

/* A request for libfuse. What is answered here is none: as if the read had been interrupted, and pyfuse3 reads again, after a
 * turn of the event loop; for a short while we go on without, because that takes as long as the copying. */
static ssize_t read_request(int fd, void *buffer, size_t size, void *data)
{
	(void)data;
	const struct in_header *header = buffer;
	double until = seconds_now() + STREAM_S;
	ssize_t got = read(fd, buffer, size);
	while (got >= (ssize_t)sizeof(*header)) {
		PyGILState_STATE state = PyGILState_Ensure();
		int served = serve(fd, header);
		int goes_on = served && (header->opcode == READ || header->opcode == WRITE) && seconds_now() < until
			      && another_comes(fd);
		PyGILState_Release(state);
		if (!served)
			break;
		if (!goes_on) {
			errno = EINTR;
			return -1;
		}
		got = read(fd, buffer, size);
	}
	if (got < (ssize_t)sizeof(*header))
		return got;
	if (header->opcode == INIT) {
		const struct init_in *init = (const void *)(header + 1);
		int extended = init->flags & INIT_EXT && got >= (ssize_t)(sizeof(*header) + sizeof(*init));
		session.offered = init->flags | (extended ? (uint64_t)init->flags2 << 32 : 0);
	}
	if ((header->opcode == INIT || header->opcode == OPEN || header->opcode == OPENDIR || header->opcode == CREATE)
	    && session.awaiting < MOST_AWAITED) {
		session.awaited[session.awaiting].unique = header->unique;
		session.awaited[session.awaiting++].opcode = header->opcode;
	}
	return got;
}

static uint32_t take_awaited(uint64_t unique)
{
	for (int at = 0; at < session.awaiting; at++)
		if (session.awaited[at].unique == unique) {
			uint32_t opcode = session.awaited[at].opcode;
			session.awaited[at] = session.awaited[--session.awaiting];
			return opcode;
		}
	return 0;
}

static void complete_init(struct init_out *out)
{
	session.agreed = session.wanted & session.offered;
	if (!session.agreed)
		return;
	/* With it, which libfuse asks for, the kernel throws away a file's pages whenever it sees a new mtime, also those that
	 * a write has just filled and not yet sent. Who reads such a page again has the old bytes, and when a store through
	 * a map makes it dirty, they are written over the new ones. That explains a loss that was seen once in a hundred runs of
	 * processes that wrote and mapped the same pages. Nothing changes a file behind this kernel's back without the
	 * operations' knowing. */
	out->flags &= ~AUTO_INVAL_DATA;
	out->flags |= (uint32_t)session.agreed;
	if (session.agreed >> 32) {
		out->flags |= INIT_EXT;
		out->flags2 |= session.agreed >> 32;
	}
	if (session.agreed & PASSTHROUGH)
		out->max_stack_depth = 1; /* images do not lie on a stacked file system; 2 would forbid overlayfs over the mount */
}

static void complete_open(struct open_out *out)
{
	int32_t id = out->fh >> 32;
	if (!id)
		return;
	out->open_flags = (out->open_flags | FOPEN_PASSTHROUGH) & ~FOPEN_KEEP_CACHE;
	out->backing_id = id;
}

static void complete_opendir(struct open_out *out)
{
	out->open_flags |= FOPEN_CACHE_DIR | (out->fh >> 32 ? FOPEN_KEEP_CACHE : 0);
}

static ssize_t write_reply(int fd, struct iovec *parts, int count, void *data)
{
	(void)data;
	const struct out_header *header = parts[0].iov_base;
	uint32_t opcode = header->unique ? take_awaited(header->unique) : 0; /* 0: a notification */
	if (opcode && !header->error && count >= 2) {
		char *body = parts[1].iov_base;
		size_t size = parts[1].iov_len, before = opcode == CREATE ? ENTRY_OUT_SIZE : 0;
		if (opcode == INIT && size >= sizeof(struct init_out))
			complete_init((struct init_out *)body);
		else if (opcode == OPENDIR && size >= sizeof(struct open_out))
			complete_opendir((struct open_out *)body);
		else if (opcode != INIT && size >= before + sizeof(struct open_out))
			complete_open((struct open_out *)(body + before));
	}
	return writev(fd, parts, count);
}

static const struct fuse_custom_io custom_io = { .read = read_request, .writev = write_reply };

/* libfuse's function of this name, and then the above. */
int fuse_session_mount(struct fuse_session *fuse, const char *mountpoint)
{
	int (*mount)(struct fuse_session *, const char *) = dlsym(RTLD_NEXT, "fuse_session_mount");
	if (!mount)
		return -1;
	int error = mount(fuse, mountpoint);
	if (error || !session.wanted)
		return error;
	session.device = fuse_session_fd(fuse);
	return fuse_session_custom_io(fuse, &custom_io, session.device);
}

/* For Python */

static PyObject *want(PyObject *self, PyObject *args)
{
	unsigned long long flags;
	if (!PyArg_ParseTuple(args, "K", &flags))
		return NULL;
	session.wanted = flags;
	Py_RETURN_NONE;
}

static PyObject *agreed(PyObject *self, PyObject *ignored)
{
	return PyLong_FromUnsignedLongLong(session.agreed);
}

static PyObject *open_backing(PyObject *self, PyObject *args)
{
	int fd;
	if (!PyArg_ParseTuple(args, "i", &fd))
		return NULL;
	if (session.backings == session.room) {
		int room = session.room ? 2 * session.room : 64;
		void *larger = PyMem_Realloc(session.backing, room * sizeof(*session.backing));
		if (!larger)
			return PyErr_NoMemory();
		session.backing = larger;
		session.room = room;
	}
	struct backing_map map = { .fd = fd };
	int id = ioctl(session.device, BACKING_OPEN, &map);
	if (id < 0)
		return PyErr_SetFromErrno(PyExc_OSError);
	session.backing[session.backings].id = id;
	session.backing[session.backings++].fd = fd;
	return PyLong_FromLong(id);
}

static PyObject *close_backing(PyObject *self, PyObject *args)
{
	int id;
	if (!PyArg_ParseTuple(args, "i", &id))
		return NULL;
	for (int at = 0; at < session.backings; at++)
		if (session.backing[at].id == id) {
			session.backing[at] = session.backing[--session.backings];
			break;
		}
	uint32_t closed = id;
	if (ioctl(session.device, BACKING_CLOSE, &closed) < 0)
		return PyErr_SetFromErrno(PyExc_OSError);
	Py_RETURN_NONE;
}

static PyObject *answer_with(PyObject *self, PyObject *operations)
{
	Py_XSETREF(session.operations, Py_NewRef(operations));
	Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
	{ "want", want, METH_VARARGS, "want(flags): accept these INIT flags where the kernel offers them; before mounting." },
	{ "agreed", agreed, METH_NOARGS, "agreed() -> flags: what both sides accepted; 0 before the first request." },
	{ "open_backing", open_backing, METH_VARARGS,
	  "open_backing(fd) -> id: let the kernel use the file of fd, which stays open until it is closed. Raises OSError." },
	{ "answer_with", answer_with, METH_O,
	  "answer_with(operations): ask them about files that the kernel does not have; see ckptfs_mount.passthrough.Answers." },
	{ "close_backing", close_backing, METH_VARARGS, "close_backing(id): the reverse. Raises OSError." },
	{ NULL, NULL, 0, NULL },
};

static struct PyModuleDef module = {
	PyModuleDef_HEAD_INIT,
	.m_name = "_passthrough",
	.m_doc = "FUSE passthrough for pyfuse3; see mount/passthrough.py.",
	.m_size = -1,
	.m_methods = methods,
};

PyMODINIT_FUNC PyInit__passthrough(void)
{
	PyObject *made = PyModule_Create(&module);
	if (made
	    && (PyModule_AddObject(made, "KILLPRIV_V2", PyLong_FromUnsignedLongLong(KILLPRIV_V2))
	        || PyModule_AddObject(made, "DIRECT_IO_MMAP", PyLong_FromUnsignedLongLong(DIRECT_IO_MMAP))
	        || PyModule_AddObject(made, "PASSTHROUGH", PyLong_FromUnsignedLongLong(PASSTHROUGH)))) {
		Py_DECREF(made);
		return NULL;
	}
	return made;
}
