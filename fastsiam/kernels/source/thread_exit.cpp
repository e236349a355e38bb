// What `static thread_local Room` needs of a C++ library, so that none has to be linked.
//
// A library then runs beside any libstdc++, and Zig, which would compile its own for each kind of
// processor, is done in seconds instead of a minute.

#include <features.h>

#if defined(__GLIBC__)

extern "C" {

int __cxa_thread_atexit_impl(void (*end)(void *), void *what, void *library);

// Remembers what is to be ended with this thread: glibc has the function under another name.
int __cxa_thread_atexit(void (*end)(void *), void *what, void *library) {
    return __cxa_thread_atexit_impl(end, what, library);
}
}

#endif
