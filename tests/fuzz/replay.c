/* replay.c - feeds every file of a corpus folder to a fuzz target, as part of normal test runs.
 *
 * usage: fuzz_X FOLDER
 * A missing folder is an error: a target without a corpus tests nothing. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int replay_file(const char *path)
{
    FILE *f = fopen(path, "rb");
    if (!f) return -1;
    size_t cap = 1u << 24;
    uint8_t *data = malloc(cap);
    size_t n = data ? fread(data, 1, cap, f) : 0;
    fclose(f);
    /* A copy of exactly n bytes, so that AddressSanitizer detects a read past the end. */
    uint8_t *exact = malloc(n ? n : 1);
    for (size_t i = 0; exact && i < n; i++) exact[i] = data[i];
    if (exact) LLVMFuzzerTestOneInput(exact, n);
    free(exact);
    free(data);
    return 0;
}

int main(int argc, char **argv)
{
    int passed = 0, failed = 0;
    DIR *d = argc > 1 ? opendir(argv[1]) : NULL;
    if (!d) {
        fprintf(stderr, "no corpus folder %s\n", argc > 1 ? argv[1] : "given");
        return 1;
    }
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        if (e->d_name[0] == '.') continue;
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", argv[1], e->d_name);
        if (replay_file(path) == 0) passed++;
        else failed++;
    }
    closedir(d);
    if (passed == 0) failed++;
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
