// Version of libjpeg-turbo: the one linked statically into this library, or the system's.
//
// build.py defines STATIC_LIBJPEG if it links the static library. It first compiles only this file,
// to find out whether that works.

#include "jpeg_huffman.h"

#include <jerror.h>
#include <stdlib.h>
#include <string.h>

#ifdef STATIC_LIBJPEG
// Debian compiles its static library for executables. To link it into a shared library, all data
// symbols that it references must be defined inside. `stderr` is the only one from libc. Only
// output_message uses it, and every caller of libjpeg-turbo replaces that function.
extern "C" {
__attribute__((visibility("hidden"))) FILE *no_stderr __asm__("stderr");
}
#endif

namespace fastsiam {

// Returns the version of the static libjpeg-turbo, e.g. 2001005 for 2.1.5; 0 for the system's.
EXPORT int fastsiam_jpeg_version() {
#ifdef STATIC_LIBJPEG
    return LIBJPEG_TURBO_VERSION_NUMBER;
#else
    return 0;
#endif
}

// Returns whether libjpeg-turbo is new enough: the system's may be older than the header. It does
// not report its version, but its copyright year is 2020 in 2.0.6 and 2.0.90, and 2021 in 2.1.0.
EXPORT int fastsiam_jpeg_fits() {
    jpeg_error_mgr error;
    jpeg_std_error(&error);
    const char *text = error.jpeg_message_table[JMSG_COPYRIGHT];
    const char *years = strstr(text, "1991-");
    return strstr(text, "libjpeg-turbo") && years && atoi(years + 5) >= 2021;
}

}  // namespace fastsiam
