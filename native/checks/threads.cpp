// Calls from several threads at once, each on several threads, over a library built with ThreadSanitizer (`make races`):
// the pool of pool.cpp is contended for, and every result has the bits of the same call alone.

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "../headrace.h"

namespace {

using Floats = std::vector<float>;

constexpr int CALLERS = 3, ROUNDS = 8, THREADS = 4;

Floats random(std::size_t size, float from, float to) {
    static std::mt19937 generator{0};
    Floats x(size);
    for (float& number : x) number = std::uniform_real_distribution<float>(from, to)(generator);
    return x;
}

void check(int status) {
    if (status == HR_OK) return;
    std::fprintf(stderr, "a call failed: %s\n", hr_message(status));
    std::exit(1);
}

// Under the delta rule with a decay per channel. There are fewer heads than threads, so that their columns are cut too.
struct Recurrence {
    static constexpr std::int64_t B = 1, T = 300, H = 2, K = 64, V = 64;
    Floats q = random(B * T * H * K, -1, 1), k = random(B * T * H * K, -0.1f, 0.1f), v = random(B * T * H * V, -1, 1),
           log_decay = random(B * T * H * K, -0.2f, 0), d_out = random(B * T * H * V, -1, 1);

    static hr_tensor place(const Floats& x) { return {const_cast<float*>(x.data()), T * H * K, H * K, K}; }

    // out, the final state, and the gradients to q, k, v and log_decay.
    Floats operator()(int threads) const {
        hr_problem p{};
        p.abi = HR_ABI, p.dtype = HR_FLOAT32, p.decay = HR_DECAY_VECTOR, p.delta = 1, p.threads = threads, p.scale = 1;
        p.B = p.sequences = B, p.T = T, p.H = p.Hq = H, p.K = K, p.V = V;
        p.q = place(q), p.k = place(k), p.v = place(v), p.log_decay = place(log_decay);
        Floats out(v.size()), state(H * K * V), kept(hr_kept_floats(&p));
        Floats dq(q.size()), dk(k.size()), dv(v.size()), dg(log_decay.size());
        const hr_tensor into = place(out), from = place(d_out);
        check(hr_forward(&p, &into, state.data(), kept.data()));
        hr_gradients gradients{};
        gradients.q = place(dq), gradients.k = place(dk), gradients.v = place(dv), gradients.log_decay = place(dg);
        check(hr_backward(&p, &from, nullptr, kept.data(), &gradients));
        Floats all;
        for (const Floats* x : {&out, &state, &dq, &dk, &dv, &dg}) all.insert(all.end(), x->begin(), x->end());
        return all;
    }
};

// A program: load, two linear layers, a norm between them, softmax attention to all tokens and to a window, store; for a
// token of each of several sequences, and for tokens of one sequence.
struct Layers {
    static constexpr std::int64_t ROWS = 20, WIDTH = 512, H = 4, HKV = 2, D = 64, LENGTH = 70, WINDOW = 9;
    Floats x = random(ROWS * WIDTH, -1, 1), weight = random(WIDTH * WIDTH, -0.1f, 0.1f),
           k = random(ROWS * LENGTH * HKV * D, -1, 1), v = random(ROWS * LENGTH * HKV * D, -1, 1);
    std::vector<double> frequencies = std::vector<double>(D / 2, 0.1);

    Floats operator()(int threads) const {
        Floats all = run(threads, false), ordered = run(threads, true);
        all.insert(all.end(), ordered.begin(), ordered.end());
        return all;
    }

    Floats run(int threads, bool in_order) const {
        Floats y(x.size()), caches[] = {k, v, k, v};
        std::vector<std::int64_t> seen(ROWS, LENGTH);
        hr_attention whole{};
        whole.scale = 0.125f, whole.amplitude = 1, whole.H = H, whole.Hkv = HKV, whole.d = whole.turned = D;
        whole.length = whole.room = LENGTH, whole.frequencies = frequencies.data();
        whole.k = caches[0].data(), whole.v = caches[1].data();
        hr_attention window = whole;
        window.window = WINDOW, window.length = window.room = WINDOW - 1, window.seen = seen.data();
        window.k = caches[2].data(), window.v = caches[3].data();
        const hr_attention attentions[] = {whole, window};

        const auto operation = [&](hr_kind kind, std::int64_t in, std::int64_t out) {
            hr_operation op{};
            op.kind = kind, op.in = in, op.out = out, op.other = -1, op.inputs = op.outputs = WIDTH, op.number = 1e-5f;
            if (kind == HR_LINEAR) op.weight = weight.data();
            op.layer = kind == HR_ATTEND && out > 0;
            return op;
        };
        std::vector<hr_operation> operations = {operation(HR_LOAD, 0, 0),           operation(HR_LINEAR, 0, WIDTH),
                                                operation(HR_NORM, WIDTH, 0),       operation(HR_LINEAR, 0, WIDTH),
                                                operation(HR_ATTEND, WIDTH, 0),     operation(HR_LINEAR, 0, WIDTH),
                                                operation(HR_ATTEND, WIDTH, H * D), operation(HR_STORE, 0, 0)};
        operations.front().state = const_cast<float*>(x.data()), operations.back().state = y.data();
        const auto count = static_cast<std::int64_t>(operations.size());
        const hr_program program{HR_ABI, threads, ROWS, 2 * WIDTH, count, 0, 0, nullptr, in_order, 2};
        check(hr_run(&program, operations.data(), nullptr, attentions));
        for (const Floats& cache : caches) y.insert(y.end(), cache.begin(), cache.end());
        return y;
    }
};

// Whether every call from several callers at once returns what a call alone returns.
template <class Call>
bool same(const Call& call) {
    const Floats expected = call(THREADS);
    std::vector<int> wrong(CALLERS);
    std::vector<std::thread> callers;
    for (int i = 0; i < CALLERS; i++)
        callers.emplace_back([&, i] {
            for (int round = 0; round < ROUNDS; round++) wrong[i] += call(THREADS) != expected;
        });
    int all = 0;
    for (int i = 0; i < CALLERS; i++) callers[i].join(), all += wrong[i];
    return all == 0;
}

}  // namespace

int main() {
    const bool recurrence = same(Recurrence{}), layers = same(Layers{});
    std::printf("%s: recurrence %s, program %s\n", hr_isa(), recurrence ? "same" : "differs",
                layers ? "same" : "differs");
    return recurrence && layers ? 0 : 1;
}
