/* file.c: tells whether a file is still what it was, at the price of one small system call. */
#include "wire.h"

#include <errno.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

static const double LOOK_SECONDS = 0.01; /* between two looks at what hardly ever changes */

int tb_stamp(const char *path, int64_t stamp[4]) {
    struct stat s;
    if (stat(path, &s)) return -errno;
    stamp[0] = (int64_t)s.st_mtim.tv_sec * 1000000000 + s.st_mtim.tv_nsec;
    stamp[1] = (int64_t)s.st_ctim.tv_sec * 1000000000 + s.st_ctim.tv_nsec;
    stamp[2] = (int64_t)s.st_size;
    stamp[3] = (int64_t)s.st_ino;
    return 0;
}

int tb_watch(const char *path) {
    const int fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    if (fd < 0) return -errno;
    if (inotify_add_watch(fd, path, IN_MODIFY | IN_ATTRIB | IN_MOVE_SELF | IN_DELETE_SELF) >= 0) return fd;
    const int error = errno;
    close(fd);
    return -error;
}

int tb_file_changed(tb_file *file, double now) {
    int64_t stamp[4];
    int waiting = 0;
    const int thoroughly = now - file->looked > LOOK_SECONDS;
    if (thoroughly) file->looked = now;
    if (file->watch >= 0 && !ioctl(file->watch, FIONREAD, &waiting) && !thoroughly && !waiting) return 0;
    const int changed = waiting > 0 || (!tb_stamp(file->path, stamp) && memcmp(stamp, file->stamp, sizeof stamp));
    if (changed) file->looked = 0;
    return changed;
}
