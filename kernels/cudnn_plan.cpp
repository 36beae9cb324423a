/* Attention as cuDNN graphs; fills in csrc/cuda/cudnn_plan.h's table.
 *
 * All of the plugin's other host code is C. Graphs are described with cudnn_frontend, which is C++
 * and header-only. This file only contains code that needs it; csrc/cuda/attention_cudnn.c caches
 * plans and allocates their workspace. No exception leaves this file.
 *
 * Forward keeps cuDNN's `stats`, (B, H, Tq, 1): the natural log of the sum of exponentials of
 * scaled scores. Our kernels store the same, so either backward can follow either forward. The
 * causal mask is aligned to the last query and key. Backward requests the deterministic algorithm
 * unless it may sum in any order.
 *
 * cuDNN is opened by name, never linked, as is the CUDA runtime that the frontend calls.
 */
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cuda_runtime_api.h>
#include <cudnn_frontend.h>
#include <dlfcn.h>
#include <string.h>

extern "C" {
#include "cuda/queue.h"
#include "cuda/cudnn_plan.h"
}

namespace fe = cudnn_frontend;

void *fe::cudnn_dlhandle = nullptr; /* the frontend's own; table_open always sets the same value */

struct fsdpc_cudnn {
    cudnnHandle_t handle;
    int sm; /* 90 is compute capability 9.0 */
};

struct fsdpc_cudnn_plan {
    fe::graph::Graph graph;
    bool backward;
};

namespace
{

enum : int64_t { Q = 1, K, V, OUT, LSE, DOUT, DQ, DK, DV };

using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

/* Calls `body`, which returns "" or the name of the call that failed. */
template <typename F> bool attempt(char *why, size_t bytes, F body)
{
    std::string said;
    try {
        said = body();
    } catch (const std::exception &error) {
        said = error.what();
        if (said.empty())
            said = "an exception without a text";
    }
    snprintf(why, bytes, "%s", said.c_str());
    return said.empty();
}

std::string said_by(fe::error_t error)
{
    if (error.is_good())
        return "";
    return error.get_message().empty() ? "cuDNN does not say why" : error.get_message();
}

std::string said_by(cudnnStatus_t status)
{
    return status == CUDNN_STATUS_SUCCESS ? "" : fe::detail::get_error_string(status);
}

/* Our strides are {batch, token, head}; cuDNN's dimensions are (B, H, T, D). */
Tensor lay_out(const Tensor &tensor, const fsdpc_cudnn_shape &s, bool keys,
               const size_t (&stride)[3], int64_t uid)
{
    auto number = [](size_t x) { return static_cast<int64_t>(x); };
    tensor->set_uid(uid);
    tensor->set_dim({number(s.batch), number(keys ? s.kv_heads : s.heads),
                     number(keys ? s.tokens_k : s.tokens_q), number(s.dim)});
    tensor->set_stride({number(stride[0]), number(stride[2]), number(stride[1]), 1});
    return tensor;
}

Tensor input(fe::graph::Graph *graph, const fsdpc_cudnn_shape &s, bool keys,
             const size_t (&stride)[3], int64_t uid)
{
    return lay_out(graph->tensor(fe::graph::Tensor_attributes()), s, keys, stride, uid);
}

Tensor lay_out_lse(const Tensor &tensor, const fsdpc_cudnn_shape &s)
{
    auto heads = static_cast<int64_t>(s.heads), tokens = static_cast<int64_t>(s.tokens_q);
    tensor->set_uid(LSE).set_data_type(fe::DataType_t::FLOAT);
    tensor->set_dim({static_cast<int64_t>(s.batch), heads, tokens, 1});
    tensor->set_stride({heads * tokens, tokens, 1, 1});
    return tensor;
}

template <typename Attributes> void set_mask(Attributes *attributes, const fsdpc_cudnn_shape &s)
{
    double scale;
    memcpy(&scale, &s.scale_bits, sizeof scale);
    attributes->set_attn_scale(static_cast<float>(scale));
    if (!s.causal)
        return;
    attributes->set_diagonal_alignment(s.tokens_q == s.tokens_k
                                           ? fe::DiagonalAlignment_t::TOP_LEFT
                                           : fe::DiagonalAlignment_t::BOTTOM_RIGHT);
    attributes->set_diagonal_band_right_bound(0);
}

void describe(fe::graph::Graph *graph, const fsdpc_cudnn_shape &s, int sm)
{
    graph->set_io_data_type(s.dtype == FSDPC_BF16 ? fe::DataType_t::BFLOAT16
                                                  : fe::DataType_t::HALF);
    graph->set_intermediate_data_type(fe::DataType_t::FLOAT);
    graph->set_compute_data_type(fe::DataType_t::FLOAT);
    graph->set_sm_version(sm);
    Tensor q = input(graph, s, false, s.stride_q, Q), k = input(graph, s, true, s.stride_k, K);
    Tensor v = input(graph, s, true, s.stride_v, V);
    if (!s.backward) {
        auto attributes = fe::graph::SDPA_attributes().set_name("attention");
        attributes.set_generate_stats(true);
        set_mask(&attributes, s);
        auto [out, lse] = graph->sdpa(q, k, v, attributes);
        lay_out(out, s, false, s.stride_out, OUT)->set_output(true);
        lay_out_lse(lse, s)->set_output(true);
        return;
    }
    Tensor out = input(graph, s, false, s.stride_out, OUT);
    Tensor dout = input(graph, s, false, s.stride_out, DOUT);
    Tensor lse = lay_out_lse(graph->tensor(fe::graph::Tensor_attributes()), s);
    auto attributes = fe::graph::SDPA_backward_attributes().set_name("attention_backward");
    attributes.set_deterministic_algorithm(!s.any_order);
    set_mask(&attributes, s);
    auto [dq, dk, dv] = graph->sdpa_backward(q, k, v, out, dout, lse, attributes);
    lay_out(dq, s, false, s.stride_q, DQ)->set_output(true);
    lay_out(dk, s, true, s.stride_k, DK)->set_output(true);
    lay_out(dv, s, true, s.stride_v, DV)->set_output(true);
}

/* Builds the first of the heuristic's plans that can be built; without a handle, for the graph's
 * own device. */
fe::error_t build(fe::graph::Graph *graph, cudnnHandle_t handle)
{
    fe::error_t error = graph->validate();
    if (error.is_good())
        error = handle ? graph->build_operation_graph(handle) : graph->build_operation_graph();
    if (error.is_good())
        error = graph->create_execution_plans({fe::HeurMode_t::A});
    if (error.is_good())
        error = graph->check_support();
    return error.is_good() ? graph->build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE) : error;
}

/* -- the table --------------------------------------------------------------------------------- */

bool table_open(size_t *version_out, char *why, size_t bytes)
{
    return attempt(why, bytes, [&]() -> std::string {
        static const char soname[] = "libcudnn.so.9";
        void *library = dlopen(soname, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
        if (!library)
            library = dlopen(soname, RTLD_NOW | RTLD_LOCAL);
        if (!library)
            return dlerror();
        fe::cudnn_dlhandle = library;
        fe::detail::get_cuda_runtime_version(); /* throws if the runtime is not a shared library */
        *version_out = fe::detail::get_backend_version();
        return "";
    });
}

bool table_create(fsdpc_cudnn **out, char *why, size_t bytes)
{
    return attempt(why, bytes, [&]() -> std::string {
        int device, major, minor;
        if (cudaGetDevice(&device) != cudaSuccess ||
            cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) !=
                cudaSuccess ||
            cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) !=
                cudaSuccess)
            return "CUDA does not tell the device's compute capability";
        auto cudnn = std::make_unique<fsdpc_cudnn>();
        cudnn->sm = 10 * major + minor;
        std::string said = said_by(fe::detail::create_handle(&cudnn->handle));
        if (said.empty())
            *out = cudnn.release();
        return said;
    });
}

void table_destroy(fsdpc_cudnn *cudnn)
{
    char why[FSDPC_CUDNN_WHY_BYTES];
    attempt(why, sizeof why, [&] { return said_by(fe::detail::destroy_handle(cudnn->handle)); });
    delete cudnn;
}

bool table_plan_create(fsdpc_cudnn *cudnn, const fsdpc_cudnn_shape *shape, fsdpc_cudnn_plan **out,
                       size_t *workspace_bytes_out, char *why, size_t bytes)
{
    return attempt(why, bytes, [&]() -> std::string {
        auto plan = std::make_unique<fsdpc_cudnn_plan>();
        plan->backward = shape->backward;
        describe(&plan->graph, *shape, cudnn->sm);
        int64_t workspace = 0;
        std::string said = said_by(build(&plan->graph, cudnn->handle));
        if (said.empty())
            said = said_by(plan->graph.get_workspace_size(workspace));
        if (!said.empty())
            return said;
        *workspace_bytes_out = static_cast<size_t>(workspace);
        *out = plan.release();
        return said;
    });
}

void table_plan_destroy(fsdpc_cudnn_plan *plan)
{
    delete plan;
}

bool table_plan_run(fsdpc_cudnn *cudnn, fsdpc_cudnn_plan *plan, const fsdpc_attention_args *args,
                    void *workspace, fsdpc_stream *stream, char *why, size_t bytes)
{
    return attempt(why, bytes, [&]() -> std::string {
        auto at = [](const void *pointer) { return const_cast<void *>(pointer); };
        std::unordered_map<int64_t, void *> places = {{Q, at(args->q)},
                                                      {K, at(args->k)},
                                                      {V, at(args->v)},
                                                      {OUT, args->out},
                                                      {LSE, args->lse}};
        if (plan->backward)
            places.insert({{DOUT, at(args->dout)}, {DQ, args->dq}, {DK, args->dk}, {DV, args->dv}});
        cudaStream_t raw = fsdpc_cuda_queue_of(stream)->raw;
        std::string said = said_by(fe::detail::set_stream(cudnn->handle, raw));
        return said.empty() ? said_by(plan->graph.execute(cudnn->handle, places, workspace)) : said;
    });
}

} // namespace

extern "C" const fsdpc_cudnn_ops fsdpc_cudnn_table = {
    table_open, table_create, table_destroy, table_plan_create, table_plan_destroy, table_plan_run,
};
