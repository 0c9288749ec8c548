/* launcher_watch.h - a node notices that the launcher which started it is gone.
 *
 * A launcher that stops ends its nodes first. One that was killed leaves them behind: they keep
 * their last view and go on serving, but nobody restarts one that ends, so an operator must know.
 * The launcher tells its nodes its process id in the environment. Life cycle: start, free.
 * Thread: loop; launcher_watch_announce: any, before there are others. */
#ifndef BATON_DEPLOY_LAUNCH_LAUNCHER_WATCH_H
#define BATON_DEPLOY_LAUNCH_LAUNCHER_WATCH_H

#include "shared/net/loop.h"

struct launcher_watch;

/* The exit status of a process that ends because another one of its node was lost: its launcher
 * starts it again, whenever that was. */
enum { LAUNCHER_START_AGAIN = 75 };

/* What its launcher is to a node. */
struct launcher_terms {
    bool holds_view; /* their directory server, too */
    bool own_secret; /* they share a secret that nobody else has */
    bool behind;     /* they are ranks behind the launcher's port, which end when it is gone */
    uint16_t port;   /* that port; 0: it has none */
};
/* For the launcher: sets the variable that its nodes inherit. */
void launcher_watch_announce(const struct launcher_terms *t);
/* Is this process a rank behind a launcher's port? *port is that, 0: the launcher has none. */
bool launcher_watch_is_behind(uint16_t *port);
/* Was this process started by a launcher? */
bool launcher_watch_has_launcher(void);
/* By one that made a secret for its nodes alone, so that none of another host can join? */
bool launcher_watch_made_secret(void);

/* Calls on_gone once, when the launcher is gone. Returns NULL when there was none; the functions
 * below then do nothing, or return false. */
struct launcher_watch *launcher_watch_start(struct loop *loop, void (*on_gone)(void *arg),
                                            void *arg);
void launcher_watch_free(struct launcher_watch *w);
/* Looks now instead of at the next tick. */
void launcher_watch_look(struct launcher_watch *w);
bool launcher_watch_is_gone(const struct launcher_watch *w);
bool launcher_watch_held_view(const struct launcher_watch *w);
/* Can only the launcher's own nodes join, since nobody else has their secret? */
bool launcher_watch_own_secret(const struct launcher_watch *w);
/* What it means that it is gone, and what to do: one sentence, valid until free. */
const char *launcher_watch_text(const struct launcher_watch *w);

#endif
