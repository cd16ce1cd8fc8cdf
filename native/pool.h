// The threads that share a call's work: PyTorch's where it is loaded, otherwise a few of our own, kept between calls.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Calls body(i, memory) for i = 0 … units − 1, on up to `threads` threads of which the caller is one. Each has `bytes`
// of memory of its own, aligned to a cache line, not cleared. Which thread does which unit is not determined. While
// threads of our own work for another call, the caller does all units: no call waits for another.
// Returns false if memory is lacking; then not all units have run.
bool run_units(std::int64_t units, int threads, std::size_t bytes,
               const std::function<void(std::int64_t, void*)>& body);

// Threads that take the same steps together.
class Team {
public:
    explicit Team(int members) : members_(members) {}
    void set_members(int members) { members_ = members; }

    // Every member calls it: f(i) is called once for each i = 0 … units − 1, and all of them have ended when it returns.
    template <class F>
    void each(std::int64_t units, F f) {
        if (members_ == 1) {
            for (std::int64_t i = 0; i < units; i++) f(i);
            return;
        }
        for (std::int64_t i; (i = next_++) < units;) f(i);
        wait();
    }

private:
    // Spinning is worth it as long as the others are running.
    void wait() {
        constexpr int SPINS = 4096;
        const unsigned round = round_;
        if (++arrived_ == members_) {
            arrived_ = 0, next_ = 0, round_ = round + 1;
            return;
        }
        for (int i = 0; round_ == round; i++) i < SPINS ? pause() : yield();
    }
    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }
    static void yield();

    std::atomic<int> members_;
    std::atomic<std::int64_t> next_{0};
    std::atomic<int> arrived_{0};
    std::atomic<unsigned> round_{0};
};

// Calls body(team, member) on up to `threads` threads of which the caller is one, and no other than those of the team.
void run_team(int threads, const std::function<void(Team&, int)>& body);

// Memory of the calling thread, aligned to a cache line, not cleared: until it asks again, or for run_units. Null where
// the system has not as many bytes.
void* own_memory(std::size_t bytes);

// Gives it back if it is large.
void release_own_memory();

// Asks the system to back memory that is fresh with large pages: one fault for 2 MiB and not for each 4 KiB of them. Only
// a hint, for memory of any origin.
void in_large_pages(const void* p, std::size_t bytes);
