/* The native CPU backend's C ABI: the recurrence of headrace.linear_attention, forward, backward and one token.

       S' = e^{g_t} S_{t-1}
       add:    S_t = S' + beta_t k_t^T (w_t v_t)                  o_t = scale r_t q_t S_t
       delta:  S_t = S' + beta_t k_t^T (w_t v_t - k_t S')

   Dimensions: B rows, T tokens, H heads (Hq of q and k; Hq divides H, consecutive heads share), K key, V value size.
   Tensors are read where they lie, by strides in elements; only the last dimension must be contiguous. Nothing is
   kept between calls but the threads and their working memory. Any T >= 0 and K, V >= 1 will do. */

#ifndef HEADRACE_H
#define HEADRACE_H

#include <stdint.h>

#define HR_ABI 4
#define HR_WIDEST 32 /* of a short convolution */

#if defined(_WIN32)
#define HR_EXPORT __declspec(dllexport)
#else
#define HR_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum hr_dtype { HR_FLOAT32 = 0, HR_BFLOAT16 = 1 };

/* [H], [B, T, H] and [B, T, H, K] */
enum hr_decay { HR_DECAY_NONE = 0, HR_DECAY_FIXED = 1, HR_DECAY_SCALAR = 2, HR_DECAY_VECTOR = 3 };

/* What the calls return. hr_message() says it in words. */
enum hr_status { HR_OK = 0, HR_WRONG_ABI = 1, HR_UNSUPPORTED = 2, HR_NO_MEMORY = 3 };

/* A tensor [B, T, H, ·] or [B, T, H]. Strides in elements; those of a size that is not there are ignored.
   data NULL: absent. */
typedef struct hr_tensor {
    void* data;
    int64_t batch, token, head;
} hr_tensor;

typedef struct hr_problem {
    int32_t abi;         /* HR_ABI */
    int32_t dtype;       /* hr_dtype of q, k, v, out and their gradients; all else is float32 */
    int32_t decay;       /* hr_decay */
    int32_t delta;       /* 1: the delta rule */
    int32_t chunk;       /* tokens per chunk; 0: chosen here. Rounded to a multiple of 16 within [16, 128] */
    int32_t threads;     /* at least 1 */
    int32_t keep_errors; /* delta: also keep what was written, V floats a token: the backward need not redo it */
    float scale;
    int64_t B, T, H, Hq, K, V;
    int64_t sequences;         /* B, or with cu_seqlens (B is 1) their number */
    const int64_t* cu_seqlens; /* sequences + 1 ascending numbers from 0 to T; NULL: each row of the batch is one */
    hr_tensor q, k, v, log_decay, beta, write_gate, read_gate;
    const float* initial_state; /* contiguous [sequences, H, K, V]; NULL: zeros */
} hr_problem;

/* Where gradients go; NULL data where none is wanted. log_decay's has log_decay's own shape: [H] if that is fixed. */
typedef struct hr_gradients {
    hr_tensor q, k, v, log_decay, beta, write_gate, read_gate;
    float* initial_state;
} hr_gradients;

/* A causal convolution of each channel with weights of its own, and SiLU. All contiguous. */
typedef struct hr_convolution {
    int64_t width;        /* 2 to HR_WIDEST */
    const float* weight;  /* [width + 1, channels]: row width - 1 meets the token itself, the last is the bias */
    const float* history; /* [sequences, width - 1, channels], what came before */
} hr_convolution;
/* One token through a whole layer, between its input projection and its output projection: short convolution, feature
   map, norm and rotation of q and k, decay, write strength, competing heads, the recurrence, norm and output gate.

   Kinds are numbered as hr_kinds() lists them. `dtype` is that of everything but memory (float32) and tokens; weights
   are contiguous, as the layer's modules hold them, NULL where the layer has no such part. projected [B, parts] has q, k
   (Hq K each), v (H V), what the decay reads (decay_reads), beta's logits (H) and what the gate reads (gate_reads),
   those that there are, in this order. */
typedef struct hr_layer {
    int32_t abi, dtype, threads;
    int32_t feature_map, qk_norm, decay, rule, beta, norm, gate, order, read, write, source, activation, gate_scale;
    float scale, norm_eps, group_eps, sum_eps, temperature;
    double rope_theta; /* 0: no rotation */
    int64_t B, D, H, Hq, K, V, conv_width, decay_reads, gate_reads;
    const void *conv_weight, *conv_bias;           /* [channels, conv_width], [channels] */
    const void *decay_up, *decay_bias, *decay_log; /* [H K, reads] ("exp": transposed), [H K] or [H], [H] */
    const void *bonus;                             /* [H, K] */
    const void *read_scores, *write_scores;        /* of the competition */
    const void *skip, *gate_up, *gate_bias;        /* [H], [H V, V], [H V] */
    const void *norm_weight, *norm_bias;           /* [V] or [H V], [H V] */
    const void *projected, *hidden;                /* [B, parts]; the layer's input [B, D] where scores read it */
    float* memory;                                 /* [B, H, K, V]; norm "sum": V + 1 columns. Updated in place */
    void* conv;                                    /* [B, conv_width - 1, channels], updated in place */
    int64_t* tokens;                               /* [B], seen so far, for the rotation; counted up */
    void* out;                                     /* [B, H V] */
} hr_layer;

/* out[r, n] = scale[n] sum_i x[r, i] weight[n, i], all contiguous: for few rows. */
typedef struct hr_int8_product {
    int32_t abi;     /* HR_ABI */
    int32_t threads; /* at least 1 */
    int64_t rows, inputs, outputs;
    const float* x;       /* [rows, inputs] */
    const int8_t* weight; /* [outputs, inputs] */
    const float* scale;   /* [outputs] */
    float* out;           /* [rows, outputs] */
} hr_int8_product;

HR_EXPORT int32_t hr_abi(void);

/* The kinds that hr_layer_step knows: a line for each field of hr_layer that is one, its name and those of its values. */
HR_EXPORT const char* hr_kinds(void);

/* "avx512bf16", "avx512", "avx2" or "portable": the code that runs here; the first is avx512 with products in bfloat16
   for problems in bfloat16. The environment's HEADRACE_ISA can ask for less. */
HR_EXPORT const char* hr_isa(void);

HR_EXPORT const char* hr_message(int status);

/* Floats that the forward must keep for the backward: about a tenth of the inputs (and with keep_errors, V a token). */
HR_EXPORT int64_t hr_kept_floats(const hr_problem* problem);

/* out like v; final_state contiguous [sequences, H, K, V]; kept NULL (nothing kept) or hr_kept_floats() floats. */
HR_EXPORT int hr_forward(const hr_problem* problem, const hr_tensor* out, float* final_state, float* kept);

/* d_out NULL data or d_final NULL: zero. kept as the forward left it, for the same problem with the same chunk. */
HR_EXPORT int hr_backward(const hr_problem* problem, const hr_tensor* d_out, const float* d_final, const float* kept,
                          const hr_gradients* gradients);

/* One token: T is 1, cu_seqlens NULL, initial_state ignored; state, contiguous [B, H, K, V], is updated in place. */
HR_EXPORT int hr_step(const hr_problem* problem, const hr_tensor* out, float* state);

/* Over the problem's v, with H of 1 and V channels; of the rest, only dtype, threads and sequences count. */
HR_EXPORT int hr_convolve(const hr_problem* problem, const hr_convolution* convolution, const hr_tensor* out);

/* d_x like v; d_weight [sequences, width + 1, channels]; d_history like history. */
HR_EXPORT int hr_convolve_backward(const hr_problem* problem, const hr_convolution* convolution, const hr_tensor* d_out,
                                   const hr_tensor* d_x, float* d_weight, float* d_history);
HR_EXPORT int hr_layer_step(const hr_layer* layer);

HR_EXPORT int hr_int8(const hr_int8_product* product);

#ifdef __cplusplus
}
#endif

#endif
