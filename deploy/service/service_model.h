/* service_model.h - which model a service has: MODEL_DIR (/models) is its folder, or the folder
 * that models are kept in, and model_name names one of them.
 *
 *     start_server            MODEL_DIR; with the variable model_name, and without a model there,
 *                             as below
 *     start_server NAME       MODEL_DIR/NAME, else what --model NAME finds
 *
 * PaddleNLP's static models have names that end in a quantisation (org/name/weight_only_int8): the
 * checkpoint is taken, and quantised so while it loads.
 *
 * Thread: main, at start. */
#ifndef BATON_DEPLOY_SERVICE_SERVICE_MODEL_H
#define BATON_DEPLOY_SERVICE_SERVICE_MODEL_H

#include "deploy/options/config.h"

#define SERVICE_MODELS "/models"

/* MODEL_DIR, or SERVICE_MODELS; and the name, NULL: none was given. Borrowed from the environment.
 */
const char *service_model_dir(void);
const char *service_model_name(void);
/* Appends where the model is, and says by which variable. ERR_NOT_FOUND: it is not on this host;
 * ERR_CONFIG: no model was named. */
enum status service_model_find(struct buf *path, const char **by, struct err *err) MUST_CHECK;
/* Could it be fetched? */
bool service_model_is_elsewhere(const char *name);
/* Sets --model, with a name --served-model-name, and --quantization where the name says one, unless
 * they are given. Errors: those of service_model_find. */
enum status service_model_complete(struct config *c, struct err *err) MUST_CHECK;

#endif
