// The only C++ runtime function that `static thread_local Room` needs; defined here, it makes
// linking a C++ runtime unnecessary.
//
// The kernels then work with any libstdc++ in the process. Zig, which would compile its own runtime
// for each kind of CPU, takes seconds instead of a minute.

#include <features.h>

#if defined(__GLIBC__)

extern "C" {

int __cxa_thread_atexit_impl(void (*end)(void *), void *what, void *library);

// Registers a destructor to call when this thread exits; glibc has it under another name.
int __cxa_thread_atexit(void (*end)(void *), void *what, void *library) {
    return __cxa_thread_atexit_impl(end, what, library);
}
}

#endif
