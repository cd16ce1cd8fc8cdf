// Numbers below 2^−126 ("denormals", what a strong decay leaves of a memory) take some processors a hundred times as long
// as others. They are zero here, in every thread that computes, whatever the caller's own setting is.

#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

// Sets the thread's flags while it lives, and puts back what was there.
class FlushDenormals {
public:
    FlushDenormals() : before_(flags()) {
        latest_ = before_;
        set(before_ | FLUSH);
    }
    ~FlushDenormals() { set(before_); }
    FlushDenormals(const FlushDenormals&) = delete;
    FlushDenormals& operator=(const FlushDenormals&) = delete;

    // Calls f with the flags that were there. A thread inherits the flags of the thread that starts it, so whatever may
    // start threads of others, which live on after the call, is called like this.
    template <class F>
    static void paused(F f) {
        const Flags during = flags();
        set(latest_);
        f();
        set(during);
    }

private:
#if defined(__SSE2__)
    using Flags = unsigned int;
    static constexpr Flags FLUSH = 0x8040;  // of MXCSR: results (FTZ) and inputs (DAZ)
    static Flags flags() { return _mm_getcsr(); }
    static void set(Flags flags) { _mm_setcsr(flags); }
#elif defined(__aarch64__)
    using Flags = std::uint64_t;
    static constexpr Flags FLUSH = std::uint64_t{1} << 24;  // of FPCR: FZ
    static Flags flags() {
        Flags found;
        __asm__ volatile("mrs %0, fpcr" : "=r"(found));
        return found;
    }
    static void set(Flags flags) { __asm__ volatile("msr fpcr, %0" : : "r"(flags)); }
#else  // other processors compute with them
    using Flags = int;
    static constexpr Flags FLUSH = 0;
    static Flags flags() { return 0; }
    static void set(Flags) {}
#endif
    const Flags before_;
    static inline thread_local Flags latest_ = 0;  // what the thread's last FlushDenormals found
};
