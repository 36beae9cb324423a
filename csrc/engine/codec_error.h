/* What codecs leave out of a unit's messages: measured for reports, kept for the next reduction,
 * and limited.
 *
 * Measuring. In every `error_every`th backward, and in copy-ins before it, the squares of what is
 * left out are summed exactly, as are those of what was to be sent. At the end of such a backward,
 * all ranks add their sums, so that the relative errors are the same on all ranks. A reduction on
 * one host sends no codes and has no error.
 *
 * Limit. Gathers or reductions whose error exceeds `error_budget` send exact numbers until the next
 * measured backward, which tries the codec again.
 *
 * Residuals. With `error_feedback`, what a reduction's messages leave out is added to the next
 * reduction's sums (ops/codec.h). There is one residual per trained flat group and stage that
 * crosses hosts, created by the first: states of a unit, which checkpoints contain.
 */
#ifndef FSDPC_ENGINE_CODEC_ERROR_H
#define FSDPC_ENGINE_CODEC_ERROR_H

#include "engine/root_internal.h"

/* Returns the codec of gathers or reductions now. */
fsdpc_codec fsdpc_codec_now(const fsdpc_unit *unit, fsdpc_coded which);

/* Returns what copy-ins are to measure now, or NULL. */
const fsdpc_codec_error *fsdpc_gather_error(fsdpc_unit *unit);

/* Finds what a stage of a reduction is to measure and keep, or NULL. Creates its residual. */
fsdpc_status fsdpc_reduce_error(fsdpc_unit *unit, fsdpc_unit_group *group, fsdpc_stage stage,
                                const fsdpc_codec_error **out);

/* Returns whether the backward that ends now is measured. */
bool fsdpc_codec_errors_due(const fsdpc_root *root);

/* Call at the end of such a backward, on all ranks, once its reductions are complete. */
fsdpc_status fsdpc_codec_errors_agree(const fsdpc_root *root);

/* Call then at the end of each backward, to count it. If the next one is measured, it uses the
 * codecs again. */
void fsdpc_codec_errors_count(fsdpc_root *root);

#endif
