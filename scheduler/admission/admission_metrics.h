/* admission_metrics.h - what an entry node counts of admission. Tenants are labels: the key file
 * bounds them. Thread: loop. */
#ifndef BATON_SCHEDULER_ADMISSION_ADMISSION_METRICS_H
#define BATON_SCHEDULER_ADMISSION_ADMISSION_METRICS_H

#include "scheduler/admission/admission.h"

void admission_metrics_register(struct admission_metrics *m, struct metrics *registry,
                                const struct tenants *tenants);
void admission_metrics_verdict(struct admission_metrics *m, const struct admit_verdict *v,
                               uint32_t tenant);
/* One that had been taken was refused after all. */
void admission_metrics_late(struct admission_metrics *m, enum admit_reason reason, uint32_t tenant);
/* Brings gauges and sums up to now. */
void admission_metrics_update(struct admission_metrics *m, struct admit *a, uint64_t now_ms);

#endif
