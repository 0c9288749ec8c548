/* nics_script.h - the text of deploy/get_rdma_nics.sh, which the build puts into the program
 * (deploy/cli/embed_text.cmake). Thread: any (a constant). */
#ifndef BATON_DEPLOY_CLI_NICS_SCRIPT_H
#define BATON_DEPLOY_CLI_NICS_SCRIPT_H

extern const char NICS_SCRIPT[];

#endif
