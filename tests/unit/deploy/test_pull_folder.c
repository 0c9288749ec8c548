/* test_pull_folder.c - files in the making and the folder they end in: journals that say no more
 * than the disk has, sums, the lock, and an end that may be cut at any point. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "deploy/pull/fetch/part.h"
#include "shared/base/hash/hash.h"
#include "shared/model/load/file_map.h"
#include "tests/harness/test.h"

enum { SIZE = 1000, CHUNK = 300 };

static char content[SIZE];
static struct pull_folder folder;
static struct err err;

static void open_folder(const char *name)
{
    static char path[256];
    int pid;
    if (name) snprintf(path, sizeof path, "%s/%s", test_tmpdir(), name);
    CHECK_OK(folder_open(path, &folder, &err));
    CHECK_OK(folder_lock(&folder, &pid, &err));
}

static struct pull_file file_of(const char *name, const char *bytes, size_t n)
{
    struct pull_file f = { .name = name, .version = "", .size = n };
    f.sum.kind = SUM_SHA256;
    sha256(bytes, n, f.sum.bytes);
    return f;
}

static void fill(void)
{
    for (size_t i = 0; i < SIZE; i++) content[i] = (char)(i * 7 + i / 100);
}

/* Bytes [from, from + n) of the content, which begin where chunk i has ended so far. */
static void write_bytes(struct part *p, uint32_t i, size_t n)
{
    const uint64_t at = part_chunk_begin(p, i) + p->chunks[i].done;
    CHECK_OK(part_write(p, i, content + at, n, &err));
}

static void put(const char *path, const char *bytes)
{
    FILE *f = fopen(path, "w");
    CHECK(f && fputs(bytes, f) >= 0 && fclose(f) == 0);
}

static void settle(struct part *p)
{
    struct buf journal = { 0 };
    part_journal(p, &journal);
    CHECK_OK(part_settle(p, buf_str(&journal), &err));
    buf_release(&journal);
}

static void hash_all(struct part *p)
{
    const atomic_bool stop = false;
    CHECK_OK(part_hash(p, part_front(p), &stop, &err));
}

/* ---- parts ---- */

TEST(a_part_goes_on_where_its_journal_says)
{
    fill();
    open_folder("a");
    const struct pull_file f = file_of("d/f", content, SIZE), other = file_of("d/f", content, 999);
    struct part p;
    part_begin(&p, &folder, &f, CHUNK);
    CHECK(p.n_chunks == 4 && part_chunk_length(&p, 3) == 100 && p.done == 0);
    CHECK_OK(part_open(&p, &err));
    write_bytes(&p, 1, 300);
    write_bytes(&p, 0, 120);
    CHECK_EQ_INT(part_front(&p), 120);
    settle(&p);
    write_bytes(&p, 3, 100); /* after the journal: to be fetched again */
    part_close(&p);

    part_begin(&p, &folder, &f, 64); /* other chunks: those of the journal stay */
    CHECK(p.n_chunks == 4 && p.done == 420 && part_chunk_is_done(&p, 1));
    CHECK_OK(part_open(&p, &err));
    write_bytes(&p, 0, 180);
    CHECK_EQ_INT(part_front(&p), 600);
    hash_all(&p);
    write_bytes(&p, 2, 300);
    write_bytes(&p, 3, 100);
    CHECK(part_is_filled(&p) && part_front(&p) == SIZE);
    hash_all(&p);
    settle(&p);
    CHECK_OK(part_check(&p, &err));
    CHECK(sum_eq(&p.sum, &f.sum));
    part_close(&p);

    part_begin(&p, &folder, &other, CHUNK); /* of another content nothing is kept */
    CHECK_EQ_INT(p.done, 0);
    part_close(&p);
    folder_close(&folder);
}

TEST(a_journal_of_bytes_that_are_not_there)
{
    fill();
    open_folder("a");
    const struct pull_file f = file_of("f", content, SIZE);
    struct part p;
    part_begin(&p, &folder, &f, CHUNK);
    CHECK_OK(part_open(&p, &err));
    write_bytes(&p, 2, 300);
    settle(&p);
    CHECK(truncate(p.path.data, 800) == 0);
    part_close(&p);
    part_begin(&p, &folder, &f, CHUNK);
    CHECK_EQ_INT(p.done, 0);
    part_close(&p);
    folder_close(&folder);
}

/* A pull that links files may end before its links are at their places: a copy begins beside the
 * file that a link leads to, and leaves that as it is. */
TEST(a_link_in_place_of_a_part)
{
    char source[256];
    struct stat s;
    fill();
    open_folder("a");
    snprintf(source, sizeof source, "%s/source", test_tmpdir());
    const struct pull_file f = file_of("f", content, SIZE);
    for (int with_journal = 0; with_journal < 2; with_journal++) {
        struct part p;
        put(source, "the source's own");
        CHECK(truncate(source, SIZE) == 0);
        part_begin(&p, &folder, &f, CHUNK);
        if (with_journal) {
            CHECK_OK(part_open(&p, &err));
            write_bytes(&p, 0, 300);
            settle(&p);
        }
        CHECK(unlink(p.path.data) == 0 || errno == ENOENT);
        CHECK(symlink(source, p.path.data) == 0);
        part_close(&p);
        part_begin(&p, &folder, &f, CHUNK);
        CHECK_EQ_INT(p.done, 0);
        CHECK_OK(part_open(&p, &err));
        write_bytes(&p, 0, 200);
        CHECK(lstat(p.path.data, &s) == 0 && S_ISREG(s.st_mode));
        CHECK(stat(source, &s) == 0 && s.st_size == SIZE);
        CHECK(unlink(p.path.data) == 0);
        part_close(&p);
    }
    folder_close(&folder);
}

TEST(sums_that_are_wrong)
{
    fill();
    open_folder("a");
    struct pull_file f = file_of("f", content, SIZE);
    struct part p;
    f.sum.bytes[3] ^= 1;
    part_begin(&p, &folder, &f, CHUNK);
    CHECK_OK(part_open(&p, &err));
    for (uint32_t i = 0; i < 4; i++) write_bytes(&p, i, (size_t)part_chunk_length(&p, i));
    hash_all(&p);
    CHECK_STATUS(part_check(&p, &err), ERR_CHECKSUM);
    CHECK(strstr(err.text, "f came with the sum sha256:") &&
          strstr(err.text, "source says sha256:"));
    CHECK_OK(part_restart(&p, true, &err));
    CHECK(p.n_chunks == 1 && p.done == 0 && part_chunk_length(&p, 0) == SIZE);
    part_close(&p);
    folder_close(&folder);
}

/* git's own name of "hello\n". */
TEST(sums_of_git)
{
    open_folder("a");
    struct pull_file f = { .name = "f", .version = "", .size = 6 };
    struct part p;
    sum_read(STR("ce013625030ba8dba906f756967f9e9ca394464a"), SUM_GIT, &f.sum);
    part_begin(&p, &folder, &f, CHUNK);
    CHECK_OK(part_open(&p, &err));
    CHECK_OK(part_write(&p, 0, "hello\n", 6, &err));
    hash_all(&p);
    CHECK_OK(part_check(&p, &err));
    CHECK(p.sum.kind == SUM_SHA256 && p.sum.bytes[0] == 0x58);
    part_close(&p);
    folder_close(&folder);
}

TEST(very_large_files_have_few_chunks)
{
    open_folder("a");
    const struct pull_file f = { .name = "f", .version = "1", .size = 1ull << 52 };
    struct part p;
    part_begin(&p, &folder, &f, 65536);
    CHECK(p.n_chunks <= PART_CHUNKS_MAX && p.n_chunks > 1000);
    CHECK_EQ_INT(part_chunk_begin(&p, p.n_chunks - 1) + part_chunk_length(&p, p.n_chunks - 1),
                 f.size);
    part_close(&p);
    folder_close(&folder);
}

/* ---- the folder ---- */

static bool reads(const char *name, const char *want)
{
    struct buf path = { 0 }, text = { 0 };
    folder_path_of(&folder, name, &path);
    bool same = file_read(path.data, 100, &text, &err) == OK && str_eq_c(buf_str(&text), want);
    buf_release(&path);
    buf_release(&text);
    return same;
}

static bool is_complete(void)
{
    struct buf path = { 0 };
    folder_path_of(&folder, MARKER_NAME, &path);
    bool there = file_is_regular(path.data);
    buf_release(&path);
    return there;
}

/* Stages a file as a fetch would. */
static void stage(const struct pull_file *f, const char *bytes)
{
    struct buf path = { 0 };
    folder_part_of(&folder, f->name, &path);
    put(path.data, bytes);
    CHECK_OK(folder_add_checked(&folder, f, path.data, &f->sum, &err));
    buf_release(&path);
}

static struct file_list list_of(const char *config, const char *weights)
{
    struct file_list l = { 0 };
    struct pull_file c = file_of("config.json", config, strlen(config)),
                     w = file_of("d/w", weights, strlen(weights));
    c.chosen = w.chosen = true;
    CHECK_OK(file_list_add(&l, &c, &err));
    CHECK_OK(file_list_add(&l, &w, &err));
    CHECK_OK(file_list_finish(&l, &err));
    return l;
}

TEST(a_folder_is_complete_or_has_no_config)
{
    struct file_list l = list_of("one", "w1");
    open_folder("x/y/a");
    stage(&l.files[0], "one");
    CHECK_EQ_INT(folder_find(&folder, &l.files[0]), FOLDER_STAGED);
    CHECK_EQ_INT(folder_find(&folder, &l.files[1]), FOLDER_ABSENT);
    CHECK(!is_complete() && !reads("config.json", "one"));
    stage(&l.files[1], "w1");
    CHECK_OK(folder_publish(&folder, &l, "org/name", &err));
    CHECK(is_complete() && reads("config.json", "one") && reads("d/w", "w1"));
    folder_close(&folder);

    open_folder(NULL); /* again, and other weights */
    CHECK_EQ_INT(folder_find(&folder, &l.files[0]), FOLDER_AT_PLACE);
    struct file_list next = list_of("one", "w2");
    CHECK_EQ_INT(folder_find(&folder, &next.files[1]), FOLDER_ABSENT);
    stage(&next.files[1], "w2");
    CHECK(is_complete() && reads("d/w", "w1")); /* until all is there */
    CHECK_OK(folder_publish(&folder, &next, "org/name", &err));
    CHECK(is_complete() && reads("config.json", "one") && reads("d/w", "w2"));
    folder_close(&folder);
    file_list_release(&l);
    file_list_release(&next);
}

/* The states that a crash in folder_publish can leave: what it had done is done by hand. */
TEST(an_end_that_was_cut)
{
    for (int point = 0; point < 4; point++) {
        char name[8];
        struct buf from = { 0 }, to = { 0 };
        struct file_list l = list_of("one", "w1"), next = list_of("one", "w2");
        snprintf(name, sizeof name, "p%d", point);
        open_folder(name);
        stage(&l.files[0], "one");
        stage(&l.files[1], "w1");
        CHECK_OK(folder_publish(&folder, &l, "org/name", &err));
        folder_close(&folder);
        open_folder(NULL);
        stage(&next.files[1], "w2");
        if (point >= 1) { /* the marker is gone */
            folder_path_of(&folder, MARKER_NAME, &from);
            CHECK(unlink(from.data) == 0);
        }
        if (point >= 2) { /* config.json waits in the staging */
            folder_path_of(&folder, "config.json", &from);
            folder_part_of(&folder, "config.json", &to);
            CHECK(rename(from.data, to.data) == 0);
        }
        if (point >= 3) { /* the weights are at their place */
            folder_part_of(&folder, "d/w", &from);
            folder_path_of(&folder, "d/w", &to);
            CHECK(rename(from.data, to.data) == 0);
        }
        close(folder.lock_fd); /* as when the process dies */
        folder.lock_fd = -1;
        folder_close(&folder);

        open_folder(NULL);
        for (size_t i = 0; i < 2; i++) {
            const enum folder_place at = folder_find(&folder, &next.files[i]);
            CHECK(at == FOLDER_STAGED || at == FOLDER_AT_PLACE);
        }
        CHECK_OK(folder_publish(&folder, &next, "org/name", &err));
        CHECK(is_complete() && reads("config.json", "one") && reads("d/w", "w2"));
        folder_close(&folder);
        buf_release(&from);
        buf_release(&to);
        file_list_release(&l);
        file_list_release(&next);
    }
}

TEST(files_that_are_not_ours)
{
    struct file_list l = list_of("one", "w1");
    struct buf path = { 0 };
    open_folder("a");
    folder_path_of(&folder, "config.json", &path);
    put(path.data, "mine");
    CHECK_EQ_INT(folder_find(&folder, &l.files[0]), FOLDER_UNKNOWN);
    stage(&l.files[1], "w1");
    CHECK(unlink(path.data) == 0);
    stage(&l.files[0], "one");
    CHECK_OK(folder_publish(&folder, &l, "org/name", &err));
    put(path.data, "two"); /* of the same size, and changed */
    struct timespec now[2] = { { .tv_nsec = UTIME_OMIT }, { .tv_sec = 1 } };
    CHECK(utimensat(AT_FDCWD, path.data, now, 0) == 0);
    CHECK_EQ_INT(folder_find(&folder, &l.files[0]), FOLDER_UNKNOWN);
    buf_release(&path);
    folder_close(&folder);
    file_list_release(&l);
}

TEST(the_lock_ends_with_its_process)
{
    int pid = 0, pipes[2];
    char byte, path[256];
    snprintf(path, sizeof path, "%s/a", test_tmpdir());
    CHECK(pipe(pipes) == 0);
    const pid_t child = fork();
    if (child == 0) {
        bool locked = folder_open(path, &folder, &err) == OK &&
                      folder_lock(&folder, &pid, &err) == OK;
        if (locked && write(pipes[1], "x", 1) == 1) pause();
        _exit(1);
    }
    CHECK(read(pipes[0], &byte, 1) == 1);
    CHECK_OK(folder_open(path, &folder, &err));
    CHECK_STATUS(folder_lock(&folder, &pid, &err), ERR_BUSY);
    CHECK_EQ_INT(pid, child);
    CHECK(kill(child, SIGKILL) == 0 && waitpid(child, NULL, 0) == child);
    CHECK_OK(folder_lock(&folder, &pid, &err));
    folder_close(&folder);
    snprintf(path + strlen(path), sizeof path - strlen(path), "/%s", FOLDER_STAGING);
    CHECK(!file_is_folder(path)); /* nothing was kept, so nothing is left */
}

/* A place for the work that is a link to nothing is an error, not a wait without end. */
TEST(a_folder_that_leads_nowhere)
{
    char path[256], staging[300];
    int pid;
    snprintf(path, sizeof path, "%s/b", test_tmpdir());
    snprintf(staging, sizeof staging, "%s/%s", path, FOLDER_STAGING);
    CHECK(mkdir(path, 0755) == 0 && symlink("/nowhere/at/all", staging) == 0);
    CHECK_OK(folder_open(path, &folder, &err));
    CHECK_STATUS(folder_lock(&folder, &pid, &err), ERR_IO);
    CHECK(strstr(err.text, staging) && strstr(err.text, "cannot be opened"));
    folder_close(&folder);
}

TEST_MAIN(CASE(a_part_goes_on_where_its_journal_says), CASE(a_journal_of_bytes_that_are_not_there),
          CASE(sums_that_are_wrong), CASE(sums_of_git), CASE(very_large_files_have_few_chunks),
          CASE(a_folder_is_complete_or_has_no_config), CASE(an_end_that_was_cut),
          CASE(files_that_are_not_ours), CASE(the_lock_ends_with_its_process),
          CASE(a_link_in_place_of_a_part), CASE(a_folder_that_leads_nowhere))
