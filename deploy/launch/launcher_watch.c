/* launcher_watch.c - see launcher_watch.h. A process whose parent has ended gets another. */
#include "deploy/launch/launcher_watch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "shared/base/mem.h"

enum { LOOK_MS = 100 };

static const char VARIABLE[] = "BATON_SUPERVISED", HOLDS_VIEW[] = ",view", OWN_SECRET[] = ",secret",
                  BEHIND[] = ",port=";

struct launcher_watch {
    pid_t launcher;
    bool held_view, own_secret, gone;
    struct loop_timer *tick;
    void (*on_gone)(void *arg);
    void *arg;
    char text[512];
};

void launcher_watch_announce(const struct launcher_terms *t)
{
    char text[64];
    snprintf(text, sizeof text, "%d%s%s", getpid(), t->holds_view ? HOLDS_VIEW : "",
             t->own_secret ? OWN_SECRET : "");
    const size_t n = strlen(text);
    if (t->behind) snprintf(text + n, sizeof text - n, "%s%u", BEHIND, t->port);
    setenv(VARIABLE, text, 1);
}

bool launcher_watch_is_behind(uint16_t *port)
{
    const char *text = getenv(VARIABLE), *at = text ? strstr(text, BEHIND) : NULL;
    *port = at ? (uint16_t)strtol(at + strlen(BEHIND), NULL, 10) : 0;
    return at != NULL;
}

bool launcher_watch_has_launcher(void) { return getenv(VARIABLE) != NULL; }

bool launcher_watch_made_secret(void)
{
    const char *text = getenv(VARIABLE);
    return text && strstr(text, OWN_SECRET) != NULL;
}

static void write_text(struct launcher_watch *w)
{
    snprintf(w->text, sizeof w->text,
             "the launcher that started this node (process %d) is gone: the nodes seen last go on "
             "serving, but nobody restarts one that ends%s; to have them supervised again, end the "
             "nodes of this launch (this one: kill %d) and run `baton launch` again",
             w->launcher, w->held_view ? ", and no other can join them" : "", getpid());
}

void launcher_watch_look(struct launcher_watch *w)
{
    if (!w || w->gone || getppid() == w->launcher) return;
    w->gone = true;
    loop_timer_free(w->tick);
    w->tick = NULL;
    w->on_gone(w->arg);
}

static void on_tick(void *arg) { launcher_watch_look(arg); }

struct launcher_watch *launcher_watch_start(struct loop *loop, void (*on_gone)(void *arg),
                                            void *arg)
{
    const char *text = getenv(VARIABLE);
    long launcher = text ? strtol(text, NULL, 10) : 0;
    if (launcher <= 0) return NULL;
    struct launcher_watch *w = MEM_NEW(struct launcher_watch);
    *w = (struct launcher_watch){ .launcher = (pid_t)launcher, .on_gone = on_gone, .arg = arg };
    w->held_view = strstr(text, HOLDS_VIEW) != NULL;
    w->own_secret = launcher_watch_made_secret();
    write_text(w);
    w->tick = loop_timer_start(loop, LOOK_MS, LOOK_MS, on_tick, w);
    return w;
}

void launcher_watch_free(struct launcher_watch *w)
{
    if (!w) return;
    loop_timer_free(w->tick);
    mem_free(w);
}

bool launcher_watch_is_gone(const struct launcher_watch *w) { return w && w->gone; }

bool launcher_watch_held_view(const struct launcher_watch *w) { return w && w->held_view; }

bool launcher_watch_own_secret(const struct launcher_watch *w) { return w && w->own_secret; }

const char *launcher_watch_text(const struct launcher_watch *w) { return w ? w->text : ""; }
