/* An fp32 path with tiles of fp32 vectors; the operands are widened during packing. Included with
 * MR, NR, ROWS. */
#include "ops/gemm_pack.h"
#include "ops/gemm_skinny.h"

enum { K_STEP = 1 };

typedef float tile_element;
typedef fsdpc_vf tile_vec;
#define tile_load fsdpc_vf_load
#define tile_splat fsdpc_vf_splat
#define tile_fma fsdpc_vf_fma
#include "ops/gemm_tile_body.h"

#define pack_lines pack_f32
#define finish_sums finish_f32
#include "ops/gemm_path_body.h"
