/* simt_overlap.cc - which pages kernels write, and what threads may do before they have waited.
 *
 * While a kernel runs, device memory is read-only; the first write to a page faults, its contents
 * are copied, and the page is opened. While a thread runs that has not waited, pages that the kernel
 * before wrote are inaccessible as well: an access faults, is judged, and is executed alone (the
 * trap flag), after which the page is closed again. Thread: simt_overlap.h. */
#include "tests/simt/simt_overlap.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <vector>

#include "tests/simt/simt_block.h"
#include "tests/simt/simt_machine.h"
#include "tests/simt/simt_sanitize.h"
#include "tests/simt/simt_symbol.h"
#include "tests/simt/simt_table.h"

enum { CHECKED_BLOCKS = 6, STEP_PAGES = 8, TRAP_FLAG = 0x100, WRITE_FAULT = 2 };
enum mode { UNKNOWN, OFF, COUNTS, DIES };
/* OUTSIDE: device memory is as other operations need it. LATE stays until one comes. */
enum phase { OUTSIDE, EARLY, LATE };

/* What a kernel wrote: the pages as they were. */
struct written {
    std::map<char *, std::unique_ptr<char[]>> pages;
    const void *kernel = nullptr;
};

struct range {
    char *begin, *end;
};
static bool begins_before(const range &a, const range &b) { return a.begin < b.begin; }

bool simt_is_early;

static struct {
    mode how = UNKNOWN;
    std::map<const void *, std::shared_ptr<written>>
        last; /* of streams whose last op is a kernel */
    const void *stream = nullptr;
    std::shared_ptr<written> before, now;
    std::map<const void *, size_t> kernels; /* that overlapped: how often */
    std::vector<range> device;
    phase at = OUTSIDE;
    bool is_old = false; /* guesses read what was there before */
    size_t n_overlapped = 0, n_checked = 0, n_waits = 0;
    char *opened[STEP_PAGES]; /* for the instruction that is executed alone */
    int n_opened = 0;
    std::atomic<size_t> n_errors{ 0 };
} overlap;

size_t simt_n_early(void) { return overlap.n_errors; }

static mode mode_of(const char *text)
{
    if (!text || !*text || strcmp(text, "off") == 0) return OFF;
    if (strcmp(text, "on") != 0 && strcmp(text, "count") != 0)
        simt_die("BATON_SIMT_OVERLAP is \"%s\", not on, count or off", text);
    /* The sanitizers have signal handlers of their own. */
    return SIMT_ASAN || SIMT_TSAN ? OFF : strcmp(text, "on") == 0 ? DIES : COUNTS;
}

static void tell_counts(void)
{
    fprintf(stderr, "simt: %zu launches overlapped the one before, %zu accesses were too early\n",
            overlap.n_overlapped, overlap.n_errors.load());
    for (auto &i : overlap.kernels) {
        char kernel[200];
        simt_symbol(i.first, kernel, sizeof kernel);
        fprintf(stderr, "simt: %zu times %s\n", i.second, kernel);
    }
}

static mode mode_now(void)
{
    if (overlap.how != UNKNOWN) return overlap.how;
    overlap.how = mode_of(getenv("BATON_SIMT_OVERLAP"));
    if (overlap.how == COUNTS) atexit(tell_counts);
    return overlap.how;
}

void simt_set_overlap(const char *how) { overlap.how = mode_of(how); }

/* ---- pages ---- */

static char *page_of(const void *p)
{
    return (char *)((uintptr_t)p & ~((uintptr_t)simt_page_bytes() - 1));
}

static void protect(char *from, size_t bytes, int how)
{
    if (mprotect(from, bytes, how) != 0) simt_die("mprotect of device memory: %s", strerror(errno));
}

/* Neighbouring pages at once. */
static void protect_pages(const written &w, int how)
{
    const size_t page = simt_page_bytes();
    for (auto i = w.pages.begin(); i != w.pages.end();) {
        char *from = i->first, *to = from;
        for (; i != w.pages.end() && i->first == to; i++) to += page;
        protect(from, (size_t)(to - from), how);
    }
}

static void protect_range(const range &r, int how)
{
    protect(r.begin, (size_t)(r.end - r.begin), how);
}

/* Only what differs is changed: models have hundreds of allocations. */
static void enter(phase at)
{
    if (overlap.at == at) return;
    if (at == OUTSIDE)
        for (const range &r : overlap.device) protect_range(r, PROT_READ | PROT_WRITE);
    if (at == EARLY) {
        protect_pages(*overlap.now, PROT_READ);
        protect_pages(*overlap.before, PROT_NONE);
    }
    if (at == LATE) {
        if (overlap.at == EARLY) protect_pages(*overlap.before, PROT_READ);
        protect_pages(*overlap.now, PROT_READ | PROT_WRITE);
    }
    overlap.at = at;
}

static bool is_device(char *at)
{
    const auto after = std::upper_bound(overlap.device.begin(), overlap.device.end(),
                                        range{ at, at }, begins_before);
    return after != overlap.device.begin() && at < std::prev(after)->end;
}

/* Before the page is written. */
static void keep(char *page)
{
    auto &copy = overlap.now->pages[page];
    if (copy) return;
    copy.reset(new char[simt_page_bytes()]);
    memcpy(copy.get(), page, simt_page_bytes());
}

/* The old contents at p, NULL if the kernel before did not write its page. */
static const char *old_at(const char *p)
{
    auto i = overlap.before->pages.find(page_of(p));
    return i == overlap.before->pages.end() ? nullptr : i->second.get() + (p - i->first);
}

/* ---- errors ---- */

static void tell(const char *what, const void *at)
{
    char kernel[200], before[200];
    simt_symbol(overlap.now->kernel, kernel, sizeof kernel);
    simt_symbol(overlap.before->kernel, before, sizeof before);
    overlap.n_errors++;
    if (mode_now() == DIES)
        simt_die("%s %s at %p before it has waited for %s (griddepcontrol.wait)", kernel, what, at,
                 before);
    fprintf(stderr, "simt: %s %s at %p before it has waited for %s (griddepcontrol.wait)\n", kernel,
            what, at, before);
}

/* Up to four bytes: how many an instruction reads is not known. The page is accessible. */
static void judge_read(const char *at, size_t bytes)
{
    const char *old = old_at(at);
    const size_t left = simt_page_bytes() - (size_t)(at - page_of(at));
    if (old && memcmp(old, at, std::min(bytes, left)) != 0)
        tell("reads what that kernel writes", at);
}

void simt_overlap_check_read(const void *from, size_t bytes)
{
    for (const char *p = (const char *)from, *end = p + bytes; p < end;) {
        const char *next = std::min<const char *>(end, page_of(p) + simt_page_bytes());
        if (old_at(p)) {
            protect(page_of(p), simt_page_bytes(), PROT_READ);
            judge_read(p, (size_t)(next - p));
            protect(page_of(p), simt_page_bytes(), PROT_NONE);
        }
        p = next;
    }
}

void simt_load_guess(void *to, const void *from, size_t bytes)
{
    const char *old = old_at((const char *)from);
    char *page = page_of(from);
    if (old && overlap.is_old) {
        memcpy(to, old, bytes); /* aligned: within the page */
        return;
    }
    if (old) protect(page, simt_page_bytes(), PROT_READ);
    memcpy(to, from, bytes);
    if (old) protect(page, simt_page_bytes(), PROT_NONE);
}

/* ---- faults ---- */

#if defined(__x86_64__)
static void close_opened(int, siginfo_t *, void *context)
{
    ucontext_t *c = (ucontext_t *)context;
    if (overlap.n_opened == 0) {
        signal(SIGTRAP, SIG_DFL); /* somebody else's: it happens again */
        return;
    }
    for (int i = 0; i < overlap.n_opened; i++)
        protect(overlap.opened[i], simt_page_bytes(),
                old_at(overlap.opened[i]) ? PROT_NONE : PROT_READ);
    overlap.n_opened = 0;
    c->uc_mcontext.gregs[REG_EFL] &= ~(greg_t)TRAP_FLAG;
}

static void step_over(char *page, ucontext_t *c)
{
    if (overlap.n_opened == STEP_PAGES)
        simt_die("an instruction touches more than %d pages", STEP_PAGES);
    overlap.opened[overlap.n_opened++] = page;
    c->uc_mcontext.gregs[REG_EFL] |= TRAP_FLAG;
}

bool simt_overlap_fault(void *at, void *context)
{
    ucontext_t *c = (ucontext_t *)context;
    const bool writes = c->uc_mcontext.gregs[REG_ERR] & WRITE_FAULT;
    char *page = page_of(at);
    if (overlap.at == OUTSIDE || simt_role_now() != SIMT_KERNEL || !is_device((char *)at))
        return false;
    if (overlap.at == LATE && !writes) return false;
    protect(page, simt_page_bytes(), PROT_READ | PROT_WRITE);
    if (writes) keep(page);
    if (overlap.at == LATE) return true;
    if (writes) tell("writes memory", at);
    else judge_read((char *)at, 4 - (uintptr_t)at % 4);
    step_over(page, c);
    return true;
}

static void catch_traps(void)
{
    struct sigaction trap = {};
    trap.sa_sigaction = close_opened;
    trap.sa_flags = SA_SIGINFO;
    sigaction(SIGTRAP, &trap, nullptr);
}
#else
bool simt_overlap_fault(void *, void *) { return false; }
static void catch_traps(void) { simt_die("BATON_SIMT_OVERLAP needs an x86-64 processor"); }
#endif

/* ---- kernels ---- */

void simt_overlap_op(const void *stream, bool is_kernel)
{
    if (mode_now() == OFF) return;
    overlap.stream = stream;
    if (is_kernel) return;
    overlap.last.erase(stream);
    enter(OUTSIDE);
}

void simt_overlap_forget(void)
{
    overlap.last.clear();
    if (overlap.at != OUTSIDE) enter(OUTSIDE);
}

void simt_overlap_closed(void) { overlap.at = OUTSIDE; }

/* Makes device memory read-only: all of it, or what the last kernel wrote and what is new. */
static void find_device(void)
{
    std::vector<range> was;
    if (overlap.at == LATE) was.swap(overlap.device), protect_pages(*overlap.now, PROT_READ);
    overlap.device.clear();
    SIMT_STATE;
    for (auto &i : simt_tables_of().device) {
        const range r = { i.second.data, i.second.data + i.second.data_bytes };
        const auto known = std::lower_bound(was.begin(), was.end(), r, begins_before);
        if (known == was.end() || known->begin != r.begin) protect_range(r, PROT_READ);
        overlap.device.push_back(r);
    }
}

void simt_overlap_begin(const simt_launch_shape &shape)
{
    static bool catches;
    if (mode_now() == OFF) return;
    if (!catches) catch_traps();
    catches = true;
    auto last = overlap.last.find(overlap.stream);
    overlap.before = shape.overlaps && last != overlap.last.end() ? last->second : nullptr;
    find_device();
    overlap.now = std::make_shared<written>();
    overlap.now->kernel = shape.kernel;
    overlap.at = LATE;
    overlap.n_checked = overlap.n_waits = 0;
    if (overlap.before) overlap.n_overlapped++, overlap.kernels[shape.kernel]++;
    overlap.is_old = __builtin_popcountl(overlap.n_overlapped) % 2; /* no period */
}

void simt_overlap_end(void)
{
    if (overlap.at == OUTSIDE) return;
    if (overlap.before && overlap.n_checked && !overlap.n_waits) tell("ends", nullptr);
    overlap.last[overlap.stream] = overlap.now;
    overlap.before = nullptr;
}

bool simt_overlap_checks(size_t i, size_t n)
{
    if (!overlap.before) return false;
    const size_t every = n / CHECKED_BLOCKS + 1;
    if (i % every && i + 1 != n) return false;
    overlap.n_checked++;
    return true;
}

void simt_overlap_set_early(bool is_early)
{
    simt_is_early = is_early;
    enter(is_early ? EARLY : LATE);
}

void simt_overlap_waited(void) { overlap.n_waits++; }
