/* Preloaded: a kernel without io_uring. valgrind lets no other thread run while one waits in the
 * calls of a ring, so programs of several threads would stand still. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <sys/syscall.h>

long syscall(long number, ...)
{
    long (*next)(long, ...) = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    long words[6];
    va_list rest;

    va_start(rest, number);
    for (int at = 0; at < 6; at++)
        words[at] = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_io_uring_setup) {
        errno = ENOSYS;
        return -1;
    }
    return next(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}
