// Preloaded by a test: fsync refuses what REFUSED_SYNC names, "folders" as on some network and FUSE file systems, or "files".
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

int fsync(int file) {
    struct stat facts;
    const char *refused = getenv("REFUSED_SYNC");
    if (refused && fstat(file, &facts) == 0 && S_ISDIR(facts.st_mode) == !strcmp(refused, "folders")) {
        errno = EINVAL;
        return -1;
    }
    return (int)syscall(SYS_fsync, file);
}
