// Which libjpeg-turbo decodes: the one linked into this library, or the system's.
//
// build.py defines STATIC_LIBJPEG where it links the static library. It compiles this file alone
// first, to learn whether that works.

#include "jpeg_huffman.h"

#include <jerror.h>
#include <stdlib.h>
#include <string.h>

#ifdef STATIC_LIBJPEG
// Debian compiles its static library for executables. A shared library can hold it if all data that
// it names lie inside, and this is the only symbol of libc among them. Only output_message uses it,
// which is replaced wherever libjpeg-turbo is called.
extern "C" {
__attribute__((visibility("hidden"))) FILE *no_stderr __asm__("stderr");
}
#endif

namespace fastsiam {

// Returns the version of the libjpeg-turbo inside, as 2001005 for 2.1.5; 0 if it is the system's.
EXPORT int fastsiam_jpeg_version() {
#ifdef STATIC_LIBJPEG
    return LIBJPEG_TURBO_VERSION_NUMBER;
#else
    return 0;
#endif
}

// Tells whether libjpeg-turbo is new enough: the system's can be older than the header was. It does
// not tell its version. The year of its copyright is 2020 in 2.0.6 and 2.0.90, and 2021 in 2.1.0.
EXPORT int fastsiam_jpeg_fits() {
    jpeg_error_mgr error;
    jpeg_std_error(&error);
    const char *text = error.jpeg_message_table[JMSG_COPYRIGHT];
    const char *years = strstr(text, "1991-");
    return strstr(text, "libjpeg-turbo") && years && atoi(years + 5) >= 2021;
}

}  // namespace fastsiam
