/* The native CPU backend's C ABI: the recurrence of headrace.linear_attention, forward, backward and one token.

       S' = e^{g_t} S_{t-1}
       add:    S_t = S' + beta_t k_t^T (w_t v_t)                  o_t = scale r_t q_t S_t
       bonus:  S_t as above                                       o_t = scale r_t q_t (S_{t-1} + diag(u) beta_t k_t^T w_t v_t)
       delta:  S_t = S' + beta_t k_t^T (w_t v_t - k_t S')

   Dimensions: B rows, T tokens, H heads (Hq of q and k; Hq divides H, consecutive heads share), K key, V value size.
   hr_step takes a multiple of H as Hq too: q, the read gate and out have Hq heads then, consecutive ones share a state.
   Tensors are read where they lie, by strides in elements; only the last dimension must be contiguous. Nothing is
   kept between calls but the threads and their working memory. Any T >= 0 and K, V >= 1 will do. */

#ifndef HEADRACE_H
#define HEADRACE_H

#include <stdint.h>

#define HR_ABI 15
#define HR_WIDEST 32     /* of a short convolution */
#define HR_SCAN_CHUNK 32 /* tokens between the states that a selective scan keeps */
#define HR_SCAN_PART 256 /* channels of a selective scan that are computed together */

#if defined(_WIN32)
#define HR_EXPORT __declspec(dllexport)
#else
#define HR_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum hr_dtype { HR_FLOAT32 = 0, HR_BFLOAT16 = 1, HR_INT8 = 2 };

/* [H], [B, T, H] and [B, T, H, K] */
enum hr_decay { HR_DECAY_NONE = 0, HR_DECAY_FIXED = 1, HR_DECAY_SCALAR = 2, HR_DECAY_VECTOR = 3 };

/* What the calls return. hr_message() says it in words. */
enum hr_status { HR_OK = 0, HR_WRONG_ABI = 1, HR_UNSUPPORTED = 2, HR_NO_MEMORY = 3, HR_NO_TOKEN = 4 };

/* A tensor [B, T, H, ·] or [B, T, H]. Strides in elements; those of a size that is not there are ignored.
   data NULL: absent. */
typedef struct hr_tensor {
    void* data;
    int64_t batch, token, head;
} hr_tensor;

typedef struct hr_problem {
    int32_t abi;     /* HR_ABI */
    int32_t dtype;   /* hr_dtype of q, k, v, out and their gradients; all else is float32 */
    int32_t decay;   /* hr_decay */
    int32_t delta;   /* 1: the delta rule */
    int32_t chunk;   /* tokens per chunk; 0: chosen here. Rounded to a multiple of 16 within [16, 128] */
    int32_t threads; /* at least 1 */
    float scale;
    int64_t B, T, H, Hq, K, V;
    int64_t sequences;         /* B, or with cu_seqlens (B is 1) their number */
    const int64_t* cu_seqlens; /* sequences + 1 ascending numbers from 0 to T; NULL: each row of the batch is one */
    hr_tensor q, k, v, log_decay, beta, write_gate, read_gate;
    const float* initial_state; /* contiguous [sequences, H, K, V]; NULL: zeros */
    const float* bonus;         /* u, contiguous [H, K]; NULL: none. Not with the delta rule or a fixed decay */
    float normalizer; /* above 0: o_t is divided by scale q_t z_t plus this, where z is the S of v = 1. States have z
                                   as column V + 1. Not with the delta rule, a bonus or a read gate; 0: none */
} hr_problem;

/* Where gradients go; NULL data where none is wanted. log_decay's has log_decay's own shape: [H] if that is fixed. */
typedef struct hr_gradients {
    hr_tensor q, k, v, log_decay, beta, write_gate, read_gate;
    float* initial_state;
    float* bonus; /* [H, K] */
} hr_gradients;

/* A causal convolution of each channel with weights of its own, and SiLU. All contiguous. */
typedef struct hr_convolution {
    int64_t width;        /* 2 to HR_WIDEST */
    const float* weight;  /* [width + 1, channels]: row width - 1 meets the token itself, the last is the bias */
    const float* history; /* [sequences, width - 1, channels], what came before */
} hr_convolution;

/* Mamba's selective scan (arXiv 2312.00752): h_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t, y_t = C_t h_t for each channel with
   S numbers. Over a problem with packed sequences whose q is C, k is B, v is u, H 1, K S and V the number of channels, all in
   float32, with an initial state. */
typedef struct hr_scan {
    const float* A; /* [S, V] */
    hr_tensor dt;   /* like u */
    float* kept;    /* [T / HR_SCAN_CHUNK + sequences, S, V], which the backward needs; NULL: nothing is kept */
} hr_scan;

/* d_B and d_C: [parts, T, S], one for every HR_SCAN_PART channels; d_A and d_initial: [sequences, S, V]. */
typedef struct hr_scan_gradients {
    hr_tensor u, dt;
    float *A, *B, *C, *initial;
} hr_scan_gradients;

/* One token of a layer, between its input projection and its output projection: short convolution, norm of heads,
   rotation, feature map and norm of q and k, decay, write strength, competing heads, the recurrence, norm and output gate.

   Kinds are numbered as hr_kinds() lists them. `dtype` is that of weights and conv; weights are contiguous, as the
   layer's modules hold them, NULL where the layer has no such part. Its input has q (Hq K), k (Hk K), v (Hv V), what the
   decay reads (decay_reads), beta's logits (H) and what the gate reads (gate_reads), those that there are, in this
   order. Consecutive heads may share a head of v, and one of q; consecutive heads of q one of k. Its output is [H V].

   A learned feature map of q and of k is softmax(y), softmax(-y) or e^y, e^-y of y = sqrt(logit_scale) W x, W [K, K] of
   each head. With a window, k and v are written to the memory by the token that is `window` later, and each reads the
   mean of a window of softmax attention, whose weights count sigmoid(window_factor), and of the memory; norm is "sum",
   no heads compete, and there is no skip. */
typedef struct hr_layer {
    int32_t dtype;
    int32_t feature_map, head_norm, qk_norm, rotary, decay, rule, beta, norm, gate, order, read, write, source,
        activation, gate_scale;
    float scale, logit_scale, head_eps, norm_eps, group_eps, sum_eps, temperature, gate_range,
        amplitude;                     /* gate_range: of a sigmoid, 1 or more; amplitude: of rotation */
    int64_t D, H, Hq, Hk, Hv, K, F, V; /* F: features of a key, the rows of a memory */
    int64_t turned;                    /* rotated channels, the first ones of a head */
    int64_t window;                    /* tokens; 0: none */
    int64_t conv_width, decay_reads, gate_reads;
    const double* frequencies;                     /* [turned / 2], radians per token */
    const void *conv_weight, *conv_bias;           /* [channels, conv_width], [channels] */
    const void *q_norm, *k_norm;                   /* [K] of each head, or [Hq K] and [Hk K] of all ("joint") */
    const void *map_q, *map_k;                     /* [Hq, K, K], of a learned feature map */
    const void* window_factor;                     /* [H] */
    const void *decay_up, *decay_bias, *decay_log; /* [H F, reads] ("exp": transposed), [H F] or [H], [H] */
    const void* bonus;                             /* [H, F] */
    const void *read_scores, *write_scores;        /* of the competition */
    const void *skip, *gate_up, *gate_bias;        /* [H], [H V, V], [H V] */
    const void *norm_weight, *norm_bias;           /* [V] or [H V], [H V] */
    float* memory;                                 /* [B, H, F, V]; norm "sum": V + 1 columns. Updated in place */
    void* conv;                                    /* [B, conv_width - 1, channels], updated in place */
    int64_t* tokens;                               /* [B], seen so far, for rotation and window; counted up */
    float *k_window, *v_window;                    /* [B, window, Hk, K], [B, window, Hv, V + 1], updated in place */
    float* decay_window;                           /* [B, window, H], of a decay that depends on the token; as these */
} hr_layer;

/* Softmax attention of one token, between its projections: rotation, the cache, and softmax(scale q k^T) v. Consecutive
   heads of q share one of k and v. Its input has q (H d), k and v (Hkv d each), in this order, each from a multiple of 16
   columns on. Its output is [H d]. */
typedef struct hr_attention {
    int32_t dtype, sinks_dtype; /* dtype: of k and v */
    int32_t null;               /* 1: every softmax has one more logit, with value 0 */
    float scale, amplitude;     /* amplitude: factor of the rotated channels */
    int64_t H, Hkv, d, turned;  /* turned: rotated channels, the first ones of a head; 0: none */
    int64_t first, window;      /* window 0: all tokens are kept */
    int64_t length, room;       /* columns with the new ones, of those that there is memory for */
    const double* frequencies;  /* [turned / 2], radians per token */
    const void* sinks;          /* [H], the additional logit; NULL: 0 */
    void *k, *v;                /* [B, room, Hkv, d], to which the tokens are added */
    const uint8_t* valid;       /* [B, length], 0 marks padding; NULL: none. Not with a window */
    int64_t* seen;              /* [B], tokens so far; counted up. With a window alone */
} hr_attention;

/* An operation of a program, on columns of its working rows of float32, one for each sequence. Numbered as
   hr_operations() lists them. */
typedef enum hr_kind {
    HR_EMBED,      /* out = number * weight[token] */
    HR_LOAD,       /* out = state[row] */
    HR_STORE,      /* state[row] = in */
    HR_NORM,       /* out (+)= norm(in); number: epsilon; with outputs above inputs, of every `inputs` of them */
    HR_LINEAR,     /* out (+)= in weight^T + bias; where there is a state, it and not out */
    HR_TRANSPOSED, /* out = in weight, for small weights [inputs, outputs] */
    HR_ACTIVATE,   /* out = f(in) * other */
    HR_MIX,        /* out = in + (state - in) * (weight + other) */
    HR_LAYER,      /* out = layer(in); other: the layer's input, where scores read it */
    HR_CAP,        /* state = number * tanh(state / number) */
    HR_ATTEND,     /* out = attention(in); other: logits of a gate [H] of its output */
    HR_KINDS_OF_OPERATIONS
} hr_kind;
typedef enum hr_norm { HR_RMS_NORM, HR_RMS_OFFSET_NORM, HR_LAYER_NORM, HR_NORMS } hr_norm;
typedef enum hr_activation {
    HR_SILU,
    HR_SIGMOID,
    HR_RELU,
    HR_RELU_SQUARED,
    HR_TANH,
    HR_GELU,
    HR_GELU_TANH,
    HR_ACTIVATIONS
} hr_activation;

typedef struct hr_operation {
    int32_t kind, what;          /* what: hr_norm or hr_activation */
    int32_t dtype, weight_dtype; /* of all but the matrix of a linear layer, and of that: also HR_INT8 */
    int32_t add, layer;          /* layer: its place among the layers, or among the attentions */
    int64_t in, other, out;      /* first columns; other -1: none */
    int64_t inputs, outputs;     /* how many */
    float number;
    const void *weight, *bias; /* NULL: none */
    const float* scale;        /* of an int8 matrix, one per row */
    void* state;               /* a tensor outside of the working rows, [rows, inputs or outputs] */
} hr_operation;

/* One token of each of `rows` sequences through operations, one after the other; or, `in_order`, `rows` tokens of one
   sequence, whose states are those after the last. */
typedef struct hr_program {
    int32_t abi, threads;
    int64_t rows, width; /* width: columns of the working rows, a multiple of 16 */
    int64_t operations, layers, vocabulary;
    const int64_t* tokens; /* [rows], of HR_EMBED */
    int64_t in_order;
    int64_t attentions;
} hr_program;

HR_EXPORT int32_t hr_abi(void);

/* The structs above as this library has them: a line for each, its name, for each field in order name:type@offset, and
   end@size. Types are those of Python's module struct, T is hr_tensor. */
HR_EXPORT const char* hr_structs(void);

/* The kinds that hr_layer knows: a line for each field of hr_layer that is one, its name and those of its values. */
HR_EXPORT const char* hr_kinds(void);

/* "avx512bf16", "avx512", "avx2" or "portable": the code that runs here; the first is avx512 with products in bfloat16
   for problems in bfloat16. The environment's HEADRACE_ISA can ask for less. */
HR_EXPORT const char* hr_isa(void);

HR_EXPORT const char* hr_message(int status);

/* Floats that the forward must keep for the backward: about a tenth of the inputs. A function of sizes alone:
   neither of where packed sequences end nor of the number of threads. */
HR_EXPORT int64_t hr_kept_floats(const hr_problem* problem);

/* out like v; final_state contiguous [sequences, H, K, V]; kept NULL (nothing kept) or hr_kept_floats() floats. */
HR_EXPORT int hr_forward(const hr_problem* problem, const hr_tensor* out, float* final_state, float* kept);

/* d_out NULL data or d_final NULL: zero. kept as the forward left it, for the same problem with the same chunk. */
HR_EXPORT int hr_backward(const hr_problem* problem, const hr_tensor* d_out, const float* d_final, const float* kept,
                          const hr_gradients* gradients);

/* One token: T is 1, cu_seqlens NULL, initial_state ignored; state, contiguous [B, H, K, V], is updated in place. */
HR_EXPORT int hr_step(const hr_problem* problem, const hr_tensor* out, float* state);

/* hr_step over other tensors with the problem's strides. addresses: of q, k, v, log_decay, beta, write_gate and read_gate,
   NULL for those that are absent, of out, contiguous, and of the state. */
HR_EXPORT int hr_step_at(const hr_problem* problem, void* const* addresses);

/* Over the problem's v, with H of 1 and V channels; of the rest, only dtype, threads and sequences count. */
HR_EXPORT int hr_convolve(const hr_problem* problem, const hr_convolution* convolution, const hr_tensor* out);

/* d_x like v; d_weight [sequences, width + 1, channels]; d_history like history. */
HR_EXPORT int hr_convolve_backward(const hr_problem* problem, const hr_convolution* convolution, const hr_tensor* d_out,
                                   const hr_tensor* d_x, float* d_weight, float* d_history);

/* out like u; state, the final one, [sequences, S, V]. */
HR_EXPORT int hr_selective_scan(const hr_problem* problem, const hr_scan* scan, const hr_tensor* out, float* state);

HR_EXPORT int hr_selective_scan_backward(const hr_problem* problem, const hr_scan* scan, const hr_tensor* d_out,
                                         const float* d_state, const hr_scan_gradients* gradients);

/* The kinds of operations, norms and activations: a line for each, its name and those of its values. */
HR_EXPORT const char* hr_operations(void);

HR_EXPORT int hr_run(const hr_program* program, const hr_operation* operations, const hr_layer* layers,
                     const hr_attention* attentions);

#ifdef __cplusplus
}
#endif

#endif
