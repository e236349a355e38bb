// Files mapped into memory that lose bytes while they are read.
//
// Where a mapped file was truncated, or cannot be read any more, the system sends SIGBUS to the
// thread that looks at it, which ends the process without a word. Here the rest of such a mapping
// becomes zeros and is marked as lost; whoever reads asks for marks before it uses what was read.

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Mapping {
    uintptr_t begin, end;  // 0 where the place is free
    int32_t lost;
};

constexpr int32_t MOST = 1 << 16;
Mapping mappings[MOST];  // pages that nobody has touched take no memory
int32_t used;            // places that were ever taken
int32_t lost;            // mappings that are marked
int32_t passing;         // a signal that is none of ours is on its way
uintptr_t page = 4096;
struct sigaction before;

// Turns the rest of the mapping that an address lies in into zeros. Calls nothing but mmap, which is
// a bare system call: this runs wherever a thread may be.
bool replaced(uintptr_t at) {
    int32_t count = __atomic_load_n(&used, __ATOMIC_ACQUIRE);
    for (int32_t i = 0; i < count; ++i) {
        Mapping &own = mappings[i];
        uintptr_t begin = __atomic_load_n(&own.begin, __ATOMIC_ACQUIRE);
        uintptr_t end = __atomic_load_n(&own.end, __ATOMIC_ACQUIRE);
        if (begin == 0 || at < begin || at >= end) continue;
        // Another thread may have given the place to another mapping between the two.
        if (__atomic_load_n(&own.begin, __ATOMIC_ACQUIRE) != begin) continue;
        uintptr_t first = at / page * page;
        void *zeros = mmap(reinterpret_cast<void *>(first), end - first, PROT_READ,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
        if (zeros == MAP_FAILED) return false;
        if (__atomic_exchange_n(&own.lost, 1, __ATOMIC_ACQ_REL) == 0)
            __atomic_fetch_add(&lost, 1, __ATOMIC_ACQ_REL);
        return true;
    }
    return false;
}

void on_bus(int number, siginfo_t *info, void *context) {
    int kept = errno;
    bool ours = info->si_code > 0 && replaced(reinterpret_cast<uintptr_t>(info->si_addr));
    errno = kept;
    if (ours) return;
    bool again = __atomic_exchange_n(&passing, 1, __ATOMIC_ACQ_REL) != 0;
    if (!again && (before.sa_flags & SA_SIGINFO) != 0) {
        before.sa_sigaction(number, info, context);
    } else if (!again && before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
    } else {  // as if there were no handler
        signal(number, SIG_DFL);
        if (info->si_code <= 0) raise(number);  // else the same address is looked at again
    }
    __atomic_store_n(&passing, 0, __ATOMIC_RELEASE);
}

}  // namespace

// Handles SIGBUS from here on, also where a library has put a handler over this one.
EXPORT void fastsiam_watch_mappings() {
    struct sigaction now;
    sigaction(SIGBUS, nullptr, &now);
    if ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == on_bus) return;
    page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    before = now;
    struct sigaction own = {};
    own.sa_sigaction = on_bus;
    own.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&own.sa_mask);
    sigaction(SIGBUS, &own, nullptr);
}

// Adds a mapping, and returns its place, -1 if there are too many. One thread at a time.
EXPORT int32_t fastsiam_add_mapping(const void *address, int64_t bytes) {
    for (int32_t i = 0; i < MOST; ++i) {
        if (mappings[i].begin != 0) continue;
        __atomic_store_n(&mappings[i].end,
                         reinterpret_cast<uintptr_t>(address) + static_cast<uintptr_t>(bytes),
                         __ATOMIC_RELEASE);
        __atomic_store_n(&mappings[i].begin, reinterpret_cast<uintptr_t>(address),
                         __ATOMIC_RELEASE);
        if (i >= used) __atomic_store_n(&used, i + 1, __ATOMIC_RELEASE);
        return i;
    }
    return -1;
}

// Forgets a mapping, before its memory is given back. One thread at a time.
EXPORT void fastsiam_drop_mapping(int32_t place) {
    __atomic_store_n(&mappings[place].begin, 0, __ATOMIC_RELEASE);
    if (__atomic_exchange_n(&mappings[place].lost, 0, __ATOMIC_ACQ_REL) != 0)
        __atomic_fetch_sub(&lost, 1, __ATOMIC_ACQ_REL);
}

// Returns how many mappings are marked as lost.
EXPORT int32_t fastsiam_lost_mappings() { return __atomic_load_n(&lost, __ATOMIC_ACQUIRE); }

// Tells whether the mapping at a place is.
EXPORT int32_t fastsiam_is_lost_mapping(int32_t place) {
    return __atomic_load_n(&mappings[place].lost, __ATOMIC_ACQUIRE);
}
