/* Lets a library compiled here load with an older C library.
 *
 * glibc assigns a function a new symbol version when its behaviour or its library changes, and the
 * linker picks the newest version. A wheel would then require a glibc at least as new as that of
 * the build machine. The older versions of the functions below have the same prototype and, for our
 * calls, the same results, and every later glibc still provides them. 2.34 moved threads and dl
 * into libc, 2.32 one function before them, and 2.29 removed error reports from exp, log and pow.
 * With the older versions, glibc 2.28 suffices (manylinux_2_28); using statx avoids the fstat
 * symbol that changed in 2.33.
 *
 * The build includes this file before any other (tools/native.py). Names that a file does not use
 * cost nothing. Sanitizer builds skip this file, because sanitizers intercept some of the functions
 * by name.
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
