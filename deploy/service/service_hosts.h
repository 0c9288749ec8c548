/* service_hosts.h - a service on several hosts, as POD_IPS, POD_0_IP, MP_NNODE and HOST_IP say.
 *
 * The host of POD_0_IP holds the cluster view, at INTER_PROC_PORT; the others register there. Where
 * the model has experts, all hosts share them as one group (--enable-expert-parallel, a rank of it
 * on each host); else each host has a whole node, and the hosts share the requests. HOST_IP says
 * which of the hosts this is, where its own addresses do not.
 * Thread: main, at start. */
#ifndef BATON_DEPLOY_SERVICE_SERVICE_HOSTS_H
#define BATON_DEPLOY_SERVICE_SERVICE_HOSTS_H

#include "deploy/options/config.h"

/* Is the service on several hosts, as the environment says? */
bool service_hosts_several(void);
/* Sets the options of this host; --model is known. ERR_CONFIG names the variable at fault. */
enum status service_hosts_complete(struct config *c, struct err *err) MUST_CHECK;

#endif
