#include "pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace {

constexpr std::size_t LINE = 64;

// Memory that a thread keeps between calls.
class Memory {
public:
    void* at_least(std::size_t bytes) {
        if (bytes <= size_) return p_.get();
        p_.reset();
        p_.reset(::operator new(bytes, std::align_val_t(LINE), std::nothrow));
        size_ = p_ ? bytes : 0;
        return p_.get();
    }

private:
    struct Release {
        void operator()(void* p) const { ::operator delete(p, std::align_val_t(LINE)); }
    };
    std::unique_ptr<void, Release> p_;
    std::size_t size_ = 0;
};

class Pool {
public:
    bool run(std::int64_t units, int threads, std::size_t bytes, const std::function<void(std::int64_t, void*)>& body) {
        std::lock_guard<std::mutex> one_call(calls_);
        std::size_t helpers = threads > 1 ? static_cast<std::size_t>(threads - 1) : 0;
        if (!provide(helpers + 1, bytes)) return false;
        helpers = start(helpers);
        {
            std::lock_guard<std::mutex> lock(state_);
            body_ = &body, units_ = units, next_ = 0, helpers_ = helpers, busy_ = helpers, round_++;
        }
        if (helpers) begin_.notify_all();
        work(0);
        std::unique_lock<std::mutex> lock(state_);
        end_.wait(lock, [&] { return busy_ == 0; });
        return true;
    }

private:
    // Starts threads until there are `count`; returns how many of these there are where the system gives no more.
    std::size_t start(std::size_t count) {
        try {
            while (threads_.size() < count) threads_.emplace_back(&Pool::wait_for_work, this, threads_.size());
        } catch (const std::system_error&) {
        }
        return std::min(count, threads_.size());
    }
    bool provide(std::size_t count, std::size_t bytes) {
        if (memory_.size() < count) memory_.resize(count);
        for (std::size_t i = 0; i < count; i++)
            if (bytes && !memory_[i].at_least(bytes)) return false;
        return true;
    }
    void work(std::size_t thread) {
        for (std::int64_t i; (i = next_++) < units_;) (*body_)(i, memory_[thread].at_least(0));
    }
    void wait_for_work(std::size_t index) {
        for (std::uint64_t seen = 0;;) {
            std::unique_lock<std::mutex> lock(state_);
            begin_.wait(lock, [&] { return round_ != seen && index < helpers_; });
            seen = round_;
            lock.unlock();
            work(index + 1);
            lock.lock();
            if (--busy_ == 0) end_.notify_one();
        }
    }

    std::mutex calls_, state_;
    std::condition_variable begin_, end_;
    std::vector<std::thread> threads_;
    std::vector<Memory> memory_;
    const std::function<void(std::int64_t, void*)>* body_ = nullptr;
    std::int64_t units_ = 0;
    std::atomic<std::int64_t> next_{0};
    std::size_t helpers_ = 0, busy_ = 0;
    std::uint64_t round_ = 0;
};

// Never destroyed: its threads wait until the process ends. A forked child has none of them, and locks in
// whatever state they were in: it forgets the pool and begins with a new one.
std::atomic<Pool*> pool{nullptr};

void forget() { pool = nullptr; }

Pool& current() {
#if !defined(_WIN32)
    static const int registered = pthread_atfork(nullptr, nullptr, forget);
    (void)registered;
#endif
    Pool* found = pool;
    if (found) return *found;
    auto made = std::make_unique<Pool>();
    return *(pool.compare_exchange_strong(found, made.get()) ? made.release() : found);
}

}  // namespace

bool run_units(std::int64_t units, int threads, std::size_t bytes,
               const std::function<void(std::int64_t, void*)>& body) {
    if (units <= 0) return true;
    return current().run(units, static_cast<int>(std::min<std::int64_t>(threads, units)), bytes, body);
}
