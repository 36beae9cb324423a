/* What lets a library that was compiled here load under an older C library.
 *
 * glibc gives a function a new version when its behaviour or its place changes, and a linker takes
 * the newest.  A wheel would then need the glibc of the machine that built it.  The functions below
 * have the same prototype, and for our calls the same results, at their older versions, which every
 * later glibc keeps.  2.34 moved threads and dl into libc, 2.32 one function before them, and 2.29
 * took error reports out of exp, log and pow.  With these, glibc 2.28 is new enough
 * (manylinux_2_28); statx avoids the change of fstat in 2.33.
 *
 * The build includes this file before every other (tools/native.py).  A name that a file does not
 * use costs it nothing.  Not under sanitizers: they replace some of the functions by name.
 */
#ifndef FSDPC_BASE_GLIBC_H
#define FSDPC_BASE_GLIBC_H

#include <features.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FSDPC_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define FSDPC_SANITIZED 1
#endif
#endif

#if defined(__x86_64__) && !defined(__ILP32__) && defined(__GLIBC__) && !defined(FSDPC_SANITIZED)
#define FSDPC_AT_VERSION(name, version) __asm__(".symver " #name "," #name "@GLIBC_" #version)

FSDPC_AT_VERSION(dlclose, 2.2.5);
FSDPC_AT_VERSION(dlerror, 2.2.5);
FSDPC_AT_VERSION(dlopen, 2.2.5);
FSDPC_AT_VERSION(dlsym, 2.2.5);
FSDPC_AT_VERSION(exp, 2.2.5);
FSDPC_AT_VERSION(log, 2.2.5);
FSDPC_AT_VERSION(pow, 2.2.5);
FSDPC_AT_VERSION(pthread_condattr_setclock, 2.3.3);
FSDPC_AT_VERSION(pthread_create, 2.2.5);
FSDPC_AT_VERSION(pthread_detach, 2.2.5);
FSDPC_AT_VERSION(pthread_join, 2.2.5);
FSDPC_AT_VERSION(pthread_mutex_consistent, 2.12);
FSDPC_AT_VERSION(pthread_mutex_trylock, 2.2.5);
FSDPC_AT_VERSION(pthread_mutexattr_destroy, 2.2.5);
FSDPC_AT_VERSION(pthread_mutexattr_init, 2.2.5);
FSDPC_AT_VERSION(pthread_mutexattr_setpshared, 2.2.5);
FSDPC_AT_VERSION(pthread_mutexattr_setrobust, 2.12);
FSDPC_AT_VERSION(pthread_once, 2.2.5);
FSDPC_AT_VERSION(pthread_setname_np, 2.12);
FSDPC_AT_VERSION(pthread_sigmask, 2.2.5);
FSDPC_AT_VERSION(pthread_timedjoin_np, 2.3.3);
#endif

#endif
