// What the dispatcher hands to the kernels, and their table: plain data, the same for every instruction set.

#pragma once

#include <cstddef>
#include <cstdint>

#include "headrace.h"
#include "kinds.h"

// Never called, only inlined: the linker would merge the copies for different instruction sets.
#define HR_INLINE inline __attribute__((always_inline))
#define HR_INLINE_LAMBDA __attribute__((always_inline))

constexpr std::int64_t SPARE = 16;  // floats kept beside the states, so that there are never none

// How a problem is cut. A sequence is a run of chunks; a state is kept before every `run`-th of them but the first.
struct Plan {
    const hr_problem* problem;
    int chunk;                    // tokens
    std::int64_t run;             // chunks
    const std::int64_t* kept_at;  // for each sequence: states kept before it, counted for one head
    std::int64_t kept_states;     // there is room for, for one head

    HR_INLINE std::int64_t row(std::int64_t sequence) const { return problem->cu_seqlens ? 0 : sequence; }
    HR_INLINE std::int64_t start(std::int64_t sequence) const {
        return problem->cu_seqlens ? problem->cu_seqlens[sequence] : 0;
    }
    // A bonus delays k, v and what belongs to them by a row, so that q reads the state before its token: then a sequence has
    // a row more than tokens.
    HR_INLINE int delay() const { return problem->bonus != nullptr; }
    HR_INLINE std::int64_t length(std::int64_t sequence) const { return tokens(sequence) + delay(); }
    HR_INLINE std::int64_t tokens(std::int64_t sequence) const {
        return problem->cu_seqlens ? problem->cu_seqlens[sequence + 1] - problem->cu_seqlens[sequence] : problem->T;
    }
    // Heads of q for each state. Heads of v may share one of q and k instead.
    HR_INLINE std::int64_t queries() const { return problem->Hq > problem->H ? problem->Hq / problem->H : 1; }
    // Columns of a state, of which the last may be the normalizer's.
    HR_INLINE std::int64_t columns() const { return problem->V + (problem->normalizer > 0); }
    HR_INLINE std::int64_t kept_floats() const { return kept_states * problem->H * problem->K * columns() + SPARE; }
};

// Whether the recurrence applies the read gate: on q, or where nothing stands between it and what is read.
HR_INLINE bool read_inside(const hr_layer& p) {
    return p.read == kinds::read::query || ((p.norm == kinds::norm::none || p.norm == kinds::norm::sum) && !p.skip);
}

// What one thread does without a pause: one head of one sequence, or some of its value columns.
struct Unit {
    std::int64_t sequence, head, part, column, columns;  // part: which of a head's blocks of columns
};

struct Forward {
    hr_tensor out;
    float* final_state;
    float* kept;
};

struct Backward {
    hr_tensor d_out;
    const float* d_final;
    const float* kept;
    const hr_gradients* gradients;  // for each part of a head
    bool by_head;                   // those of q and k are float32 and have H heads
    double* fixed_decay;            // to a fixed decay, [parts, sequences, H]; NULL when not wanted
    double* bonus;                  // to the bonus, [parts, sequences, H, K]; NULL when not wanted
};

// What heads that share something, and the parts of a head, found by themselves: [parts, B, T, H, width] float32.
// Added up, in a fixed order, into [B, T, H / shared, width].
struct Gather {
    const float* from;
    std::int64_t parts, shared, width;
    hr_tensor into;
    bool half;
};

struct Step {
    hr_tensor out;
    float* state;
    const float* bonus;  // [H, K]: q reads the state as it was, and with this weight what is written now; NULL: none
};

// Of a linear layer: inputs that share a scale where they are rounded for int8; rows from which they are transposed
// instead, and rows of a panel of these.
constexpr int INT8_BLOCK = 1024, MANY_ROWS = 24, PANEL = 32;

// The working memory of a program: rows of numbers, and a linear layer's input as integers or transposed.
struct Working {
    const hr_program* program;
    float* rows;
    std::int64_t width;
    std::int16_t* integers;
    float* scales;
    std::int64_t integer_row, scale_row;
    float* transposed;  // of many rows: panels [inputs, PANEL]; NULL for few

    bool many() const { return program->rows >= MANY_ROWS; }

    HR_INLINE float* at(std::int64_t row, std::int64_t column) const { return rows + row * width + column; }
    HR_INLINE std::int16_t* integers_of(std::int64_t row) const { return integers + row * integer_row; }
    HR_INLINE float* scales_of(std::int64_t row) const { return scales + row * scale_row; }
};

// A layer's token between its projections, and float32 numbers of it on their way: [B, ·], rows `…_row` apart.
struct Layer {
    const hr_layer* layer;
    const float *projected, *hidden;  // rows `row` apart, as those of the result
    float* result;
    std::int64_t row;
    float *q, *k, *v, *decay, *beta, *read, *write, *out;  // v and out: [H, columns]
    float *low, *wide;                                     // for what is needed only for a moment
    float* near;                                           // sums of a window [H, columns]
    float* bonus;                                          // [H, F], the same for all rows; NULL: none
    std::int64_t key_row, value_row, decay_row, head_row, low_row, wide_row, near_row, columns;
    bool in_order;  // rows are tokens of one sequence
};

// A token of softmax attention between its projections, with rows `row` apart.
struct Attention {
    const hr_attention* attention;
    float *q, *k, *v, *out;
    const float* gate;  // [H], logits; NULL: none
    std::int64_t row, rows, score_row;
    bool in_order;  // rows are tokens of one sequence
};

struct Convolution {
    hr_convolution given;
    hr_tensor out;  // in the backward its gradient
    hr_tensor d_x;
    float* d_weight;  // NULL: a forward
    float* d_history;
};

struct Scan {
    const float* A;
    float *kept, *state;  // state: in the backward its gradient
    hr_tensor dt, out;    // out: in the backward its gradient
    hr_tensor d_u, d_dt;  // no data: a forward
    float *d_A, *d_B, *d_C, *d_initial;
};

// How to do a job unit by unit. A thread gives `run` the memory that `measure` asks for, aligned to a cache line.
template <class Job>
struct Work {
    std::size_t (*measure)(const Plan&, const Job&, const Unit&);
    void (*run)(const Plan&, const Job&, const Unit&, void* memory);
};

struct Kernels {
    const char* name;
    int width;  // floats of a vector
    Work<Forward> forward;
    Work<Backward> backward;
    Work<Gather> gather{};
    Work<Step> step{};
    Work<Convolution> convolution{};
    Work<Scan> scan{};
    void (*enter)(const Layer&, std::int64_t row) = nullptr;                // what comes before the recurrence
    void (*leave)(const Layer&, std::int64_t row) = nullptr;                // and after it
    void (*enter_attention)(const Attention&, std::int64_t row) = nullptr;  // as of a layer
    void (*attend)(const Attention&, std::int64_t row, std::int64_t head, float* scores) = nullptr;
    void (*leave_attention)(const Attention&, std::int64_t row) = nullptr;
    void (*operate)(const Working&, const hr_operation&, std::int64_t row) = nullptr;
    void (*linear)(const Working&, const hr_operation&, std::int64_t first,
                   std::int64_t last) = nullptr;  // rows of the weight
};

// Those that run on this machine.
const Kernels& kernels();
