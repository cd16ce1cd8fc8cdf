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
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "denormals.h"

namespace {

using Body = std::function<void(std::int64_t, void*)>;

constexpr std::size_t LINE = 64;
constexpr std::size_t KEPT = std::size_t{16} << 20;  // bytes that a thread holds on to between calls, at most

// A thread's working memory.
class Memory {
public:
    // Null where the system has not as many bytes.
    void* at_least(std::size_t bytes) {
        if (bytes <= size_) return p_.get();
        release();
        p_.reset(::operator new(bytes, std::align_val_t(LINE), std::nothrow));
        size_ = p_ ? bytes : 0;
        in_large_pages(p_.get(), size_);
        return p_.get();
    }
    void release_if_large() {
        if (size_ > KEPT) release();
    }

private:
    void release() { p_.reset(), size_ = 0; }
    struct Release {
        void operator()(void* p) const { ::operator delete(p, std::align_val_t(LINE)); }
    };
    std::unique_ptr<void, Release> p_;
    std::size_t size_ = 0;
};

// One call's units, which its threads take one by one.
struct Units {
    const Body& body;
    const std::int64_t count;
    std::atomic<std::int64_t> next{0};

    void work(void* memory) {
        for (std::int64_t i; (i = next++) < count;) body(i, memory);
    }
};

class Pool {
public:
    // Works on the units here and on up to `helpers` threads of the pool; without these while they help another call.
    void run(Units& units, std::size_t helpers, std::size_t bytes, void* memory) {
        const std::unique_lock<std::mutex> call(calls_, std::try_to_lock);
        if (call) begin(units, ready(helpers, bytes));
        units.work(memory);
        if (call) finish();
    }

private:
    // How many of `count` helpers there are: fewer where the system gives no more threads or no memory for them.
    std::size_t ready(std::size_t count, std::size_t bytes) {
        if (memory_.size() < count) memory_.resize(count);
        try {
            while (threads_.size() < count) threads_.emplace_back(&Pool::help, this, threads_.size());
        } catch (const std::system_error&) {
        }
        std::size_t found = 0;
        while (found < std::min(count, threads_.size()) && (!bytes || memory_[found].at_least(bytes))) found++;
        return found;
    }
    void begin(Units& units, std::size_t helpers) {
        {
            std::lock_guard<std::mutex> lock(state_);
            units_ = &units, helpers_ = busy_ = helpers, round_++;
        }
        if (helpers) begin_.notify_all();
    }
    void finish() {
        std::unique_lock<std::mutex> lock(state_);
        end_.wait(lock, [&] { return busy_ == 0; });
        for (Memory& memory : memory_) memory.release_if_large();
    }
    void help(std::size_t index) {
        const FlushDenormals flush;
        for (std::uint64_t seen = 0;;) {
            std::unique_lock<std::mutex> lock(state_);
            begin_.wait(lock, [&] { return round_ != seen && index < helpers_; });
            seen = round_;
            void* memory = memory_[index].at_least(0);
            lock.unlock();
            units_->work(memory);
            lock.lock();
            if (--busy_ == 0) end_.notify_one();
        }
    }

    std::mutex calls_, state_;
    std::condition_variable begin_, end_;
    std::vector<std::thread> threads_;
    std::vector<Memory> memory_;
    Units* units_ = nullptr;
    std::uint64_t round_ = 0;
    std::size_t helpers_ = 0, busy_ = 0;
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

thread_local Memory own;

}  // namespace

void in_large_pages(const void* p, std::size_t bytes) {
#if defined(__linux__)
    constexpr std::uintptr_t PAGE = 4096, LARGE = std::uintptr_t{2} << 20;
    const auto begin = (reinterpret_cast<std::uintptr_t>(p) + PAGE - 1) / PAGE * PAGE;
    if (bytes >= 2 * LARGE) madvise(reinterpret_cast<void*>(begin), (bytes - PAGE) / PAGE * PAGE, MADV_HUGEPAGE);
#else
    (void)p, (void)bytes;
#endif
}

bool run_units(std::int64_t units, int threads, std::size_t bytes, const Body& body) {
    if (units <= 0) return true;
    void* memory = own.at_least(bytes);
    if (bytes && !memory) return false;
    Units all{body, units};
    const std::int64_t helpers = std::min<std::int64_t>(threads, units) - 1;
    if (helpers > 0)
        current().run(all, static_cast<std::size_t>(helpers), bytes, memory);
    else
        all.work(memory);
    own.release_if_large();
    return true;
}
