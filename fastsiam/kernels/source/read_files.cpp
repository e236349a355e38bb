// Lists folders and reads many small files in one call, because handling each one in Python takes
// longer than decoding it.

#include "job.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <strings.h>
#include <unistd.h>

namespace {

constexpr int64_t LONGEST = 4096;  // PATH_MAX on Linux, including the terminating zero

int open_again(int folder, const char *path, int flags) {
    int file;
    do file = openat(folder, path, flags | O_CLOEXEC);
    while (file < 0 && errno == EINTR);
    return file;
}

// Reads an open file into memory. Returns its size, or -1 if it does not fit or cannot be read.
int64_t read_whole(int file, uint8_t *memory, int64_t capacity) {
    // Not fstat, because its symbol requires glibc 2.33.
    const int64_t size = lseek(file, 0, SEEK_END);
    if (size < 0 || size > capacity) return -1;
    int64_t done = 0;
    while (done < size) {
        const int64_t count = pread(file, memory + done, size - done, done);
        if (count < 0 && errno != EINTR) return -1;
        if (count == 0) break;  // truncated in the meantime
        if (count > 0) done += count;
    }
    return done;
}

// Returns whether a file name has one of these extensions: strings, the last of which is empty.
bool has_ending(const char *name, int64_t length, const char *endings) {
    for (const char *ending = endings; *ending;) {
        const int64_t bytes = strlen(ending);
        if (length >= bytes && !strcasecmp(name + length - bytes, ending)) return true;
        ending += bytes + 1;
    }
    return false;
}

}  // namespace

// Writes the names of a folder's images to `names`, each with its terminating zero.
//
// Images are regular files with one of the extensions `endings`; hidden files are skipped. Returns
// the number of bytes of all names, of which `names` holds nothing useful if that is more than
// `capacity`; or -1 if the folder cannot be listed, or holds anything else.
EXPORT int64_t fastsiam_list_images(const char *folder, const char *endings, char *names,
                                    int64_t capacity) {
    DIR *entries = opendir(folder);
    if (!entries) return -1;
    int64_t size = 0;
    errno = 0;
    while (const dirent *entry = readdir(entries)) {
        const char *name = entry->d_name;
        if (name[0] == '.') continue;
        const int64_t length = strlen(name);
        if (entry->d_type != DT_REG || !has_ending(name, length, endings)) {
            size = -1;
            break;
        }
        size += length + 1;
        if (size <= capacity) memcpy(names + size - length - 1, name, length + 1);
    }
    if (errno) size = -1;
    closedir(entries);
    return size;
}

// Reads files into memory, one after the other.
//
// `names` contains a path of `width` bytes for each file of the data set, padded with zeros,
// absolute or relative to `folder`. `which` lists the indices of the `count` files to read, and
// `size` receives their sizes. Returns the number of files read: fewer than `count` if one does not
// fit or cannot be read.
EXPORT int64_t fastsiam_read_files(const char *folder, const char *names, int64_t width,
                                   const int64_t *which, int64_t count, uint8_t *memory,
                                   int64_t capacity, int64_t *size) {
    if (width >= LONGEST) return 0;
    const int parent = open_again(AT_FDCWD, folder, O_RDONLY | O_DIRECTORY);
    if (parent < 0) return 0;
    char path[LONGEST];
    int64_t done = 0;
    for (; done < count; done++) {
        memcpy(path, names + which[done] * width, width);
        path[width] = 0;
        const int file = open_again(parent, path, O_RDONLY);
        if (file < 0) break;
        size[done] = read_whole(file, memory, capacity);
        close(file);
        if (size[done] < 0) break;
        memory += size[done];
        capacity -= size[done];
    }
    close(parent);
    return done;
}
