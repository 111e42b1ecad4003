/* Makes the files below one directory as slow as a distant store: LD_PRELOAD.

   Each call that would be a request there takes SLOW_FILES_CONTROL's delay more, and the bytes that
   are read or written go through one pipe of so many bytes a second, which all threads and
   processes share. Calls are counted by kind. fstat, lseek and close of an open file are free, as
   nothing would be asked over the network for them; mapped files are not seen at all.

   SLOW_FILES_BELOW is the directory, SLOW_FILES_CONTROL a file of 64-bit numbers: see struct. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum kind { OPEN, STAT, LIST, READ, WRITE, SYNC, CHANGE, KINDS };

struct control {
  _Atomic uint64_t delay_ns, bytes_per_s, free_at_ns, bytes, counts[KINDS];
};

static struct control *control;
static const char *below;
static size_t below_length;
static _Atomic char is_slow[1 << 16]; /* by file descriptor */

/* The function of that name in libc. */
#define REAL(name)                                                     \
  static __typeof__(&name) real;                                       \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("SLOW_FILES_CONTROL");
  const char *directory = getenv("SLOW_FILES_BELOW");
  if (!path || !directory) return;
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return;
  void *mapped = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (mapped == MAP_FAILED) return;
  below = directory;
  below_length = strlen(directory);
  control = mapped;
}

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + now.tv_nsec;
}

static void request(enum kind kind, ssize_t bytes) {
  int error = errno;
  atomic_fetch_add(&control->counts[kind], 1);
  uint64_t delay = control->delay_ns, until = now_ns() + delay;
  if (bytes > 0) {
    atomic_fetch_add(&control->bytes, bytes);
    if (delay) { /* the bytes queue behind those of the others */
      uint64_t takes = (uint64_t)bytes * 1000000000u / control->bytes_per_s;
      uint64_t free_at = control->free_at_ns, start;
      do start = free_at > until ? free_at : until;
      while (!atomic_compare_exchange_weak(&control->free_at_ns, &free_at, start + takes));
      until = start + takes;
    }
  }
  if (delay) {
    struct timespec end = {until / 1000000000u, until % 1000000000u};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL) == EINTR);
  }
  errno = error;
}

static int slow_fd(int fd) { return control && fd >= 0 && fd < 1 << 16 && is_slow[fd]; }

static int slow_path(int dir, const char *path) {
  if (!control || !path) return 0;
  if (path[0] != '/') return slow_fd(dir);
  return !strncmp(path, below, below_length) && (!path[below_length] || path[below_length] == '/');
}

static int opened(int fd, int slow) {
  if (fd >= 0 && fd < 1 << 16) is_slow[fd] = slow;
  if (slow) request(OPEN, 0);
  return fd;
}

#define MODE(flags)                                                    \
  mode_t mode = 0;                                                     \
  if ((flags) & (O_CREAT | O_TMPFILE)) {                               \
    va_list more;                                                      \
    va_start(more, flags);                                             \
    mode = va_arg(more, mode_t);                                       \
    va_end(more);                                                      \
  }

#define OPEN_LIKE(name)                                                \
  int name(const char *path, int flags, ...) {                         \
    REAL(name);                                                        \
    MODE(flags)                                                        \
    return opened(real(path, flags, mode), slow_path(-1, path));       \
  }
OPEN_LIKE(open)
OPEN_LIKE(open64)

#define OPENAT_LIKE(name)                                              \
  int name(int dir, const char *path, int flags, ...) {                \
    REAL(name);                                                        \
    MODE(flags)                                                        \
    return opened(real(dir, path, flags, mode), slow_path(dir, path)); \
  }
OPENAT_LIKE(openat)
OPENAT_LIKE(openat64)

int close(int fd) {
  REAL(close);
  if (fd >= 0 && fd < 1 << 16) is_slow[fd] = 0;
  return real(fd);
}

/* name(parameters) asks once, if `slow`; `bytes` says what went through the pipe. */
#define ASKS(type, name, parameters, arguments, slow, kind, bytes)     \
  type name parameters {                                               \
    REAL(name);                                                        \
    type result = real arguments;                                      \
    if (slow) request(kind, bytes);                                    \
    return result;                                                     \
  }
#define PATH_CALL(type, name, parameters, arguments, path, kind)       \
  ASKS(type, name, parameters, arguments, slow_path(-1, path), kind, 0)

PATH_CALL(int, stat, (const char *p, struct stat *s), (p, s), p, STAT)
PATH_CALL(int, lstat, (const char *p, struct stat *s), (p, s), p, STAT)
PATH_CALL(int, stat64, (const char *p, struct stat64 *s), (p, s), p, STAT)
PATH_CALL(int, lstat64, (const char *p, struct stat64 *s), (p, s), p, STAT)
PATH_CALL(int, access, (const char *p, int how), (p, how), p, STAT)
ASKS(int, fstatat, (int d, const char *p, struct stat *s, int f), (d, p, s, f), slow_path(d, p), STAT, 0)
ASKS(int, fstatat64, (int d, const char *p, struct stat64 *s, int f), (d, p, s, f), slow_path(d, p), STAT, 0)
ASKS(int, statx, (int d, const char *p, int f, unsigned m, struct statx *s), (d, p, f, m, s),
     slow_path(d, p), STAT, 0)
/* What programs call that were linked with a libc older than 2.33. */
int __xstat(int, const char *, struct stat *);
int __lxstat(int, const char *, struct stat *);
int __xstat64(int, const char *, struct stat64 *);
int __lxstat64(int, const char *, struct stat64 *);
PATH_CALL(int, __xstat, (int v, const char *p, struct stat *s), (v, p, s), p, STAT)
PATH_CALL(int, __lxstat, (int v, const char *p, struct stat *s), (v, p, s), p, STAT)
PATH_CALL(int, __xstat64, (int v, const char *p, struct stat64 *s), (v, p, s), p, STAT)
PATH_CALL(int, __lxstat64, (int v, const char *p, struct stat64 *s), (v, p, s), p, STAT)

PATH_CALL(DIR *, opendir, (const char *p), (p), p, LIST)

PATH_CALL(int, mkdir, (const char *p, mode_t m), (p, m), p, CHANGE)
PATH_CALL(int, rmdir, (const char *p), (p), p, CHANGE)
PATH_CALL(int, unlink, (const char *p), (p), p, CHANGE)
PATH_CALL(int, rename, (const char *p, const char *to), (p, to), p, CHANGE)
PATH_CALL(int, link, (const char *p, const char *to), (p, to), p, CHANGE)
ASKS(int, mkdirat, (int d, const char *p, mode_t m), (d, p, m), slow_path(d, p), CHANGE, 0)
ASKS(int, unlinkat, (int d, const char *p, int f), (d, p, f), slow_path(d, p), CHANGE, 0)
ASKS(int, renameat, (int d, const char *p, int e, const char *to), (d, p, e, to), slow_path(d, p), CHANGE, 0)
ASKS(int, renameat2, (int d, const char *p, int e, const char *to, unsigned f), (d, p, e, to, f),
     slow_path(d, p), CHANGE, 0)
ASKS(int, linkat, (int d, const char *p, int e, const char *to, int f), (d, p, e, to, f),
     slow_path(d, p), CHANGE, 0)

ASKS(int, fsync, (int fd), (fd), slow_fd(fd), SYNC, 0)
ASKS(int, fdatasync, (int fd), (fd), slow_fd(fd), SYNC, 0)

ASKS(ssize_t, read, (int fd, void *b, size_t n), (fd, b, n), slow_fd(fd), READ, result)
ASKS(ssize_t, pread, (int fd, void *b, size_t n, off_t o), (fd, b, n, o), slow_fd(fd), READ, result)
ASKS(ssize_t, pread64, (int fd, void *b, size_t n, off64_t o), (fd, b, n, o), slow_fd(fd), READ, result)
ASKS(ssize_t, readv, (int fd, const struct iovec *v, int n), (fd, v, n), slow_fd(fd), READ, result)
ASKS(ssize_t, preadv, (int fd, const struct iovec *v, int n, off_t o), (fd, v, n, o), slow_fd(fd), READ, result)
ASKS(ssize_t, preadv64, (int fd, const struct iovec *v, int n, off64_t o), (fd, v, n, o), slow_fd(fd), READ, result)
ASKS(ssize_t, preadv2, (int fd, const struct iovec *v, int n, off_t o, int f), (fd, v, n, o, f),
     slow_fd(fd), READ, result)
ASKS(ssize_t, preadv64v2, (int fd, const struct iovec *v, int n, off64_t o, int f), (fd, v, n, o, f),
     slow_fd(fd), READ, result)
ASKS(ssize_t, write, (int fd, const void *b, size_t n), (fd, b, n), slow_fd(fd), WRITE, result)
ASKS(ssize_t, pwrite, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o), slow_fd(fd), WRITE, result)
ASKS(ssize_t, pwrite64, (int fd, const void *b, size_t n, off64_t o), (fd, b, n, o), slow_fd(fd), WRITE, result)
ASKS(ssize_t, writev, (int fd, const struct iovec *v, int n), (fd, v, n), slow_fd(fd), WRITE, result)
