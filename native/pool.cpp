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
#include <dlfcn.h>
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

thread_local Memory own;

// One call's units, which its threads take one by one.
struct Units {
    const Body& body;
    const std::int64_t count;
    const std::size_t bytes;
    std::atomic<std::int64_t> next{0};

    // False where units are left and this thread has no memory for them.
    bool work() {
        if (next >= count) return true;
        void* memory = own.at_least(bytes);
        if (bytes && !memory) return false;
        for (std::int64_t i; (i = next++) < count;) body(i, memory);
        own.release_if_large();
        return true;
    }
};

class Pool {
public:
    // Works on the units here and on up to `helpers` threads of the pool, if these do not help another call.
    void run(Units& units, std::size_t helpers) {
        const std::unique_lock<std::mutex> call(calls_, std::try_to_lock);
        if (!call) return;
        begin(units, ready(helpers));
        units.work();
        finish();
    }

    void run(int threads, const std::function<void(Team&, int)>& body) {
        const std::unique_lock<std::mutex> call(calls_, std::try_to_lock);
        const std::size_t helpers = call ? ready(threads - 1) : 0;
        Team team(static_cast<int>(helpers) + 1);
        // A member waits for the others within its unit, so that no thread takes two.
        const Body member = [&](std::int64_t i, void*) { body(team, static_cast<int>(i)); };
        Units units{member, static_cast<std::int64_t>(helpers) + 1, 0};
        if (call) begin(units, helpers);
        units.work();
        if (call) finish();
    }

private:
    // How many of `helpers` threads there are, if the system gives no more.
    std::size_t ready(std::size_t helpers) {
        try {
            while (threads_.size() < helpers) threads_.emplace_back(&Pool::help, this, threads_.size());
        } catch (const std::system_error&) {
            return threads_.size();
        }
        return helpers;
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
    }
    void help(std::size_t index) {
        const FlushDenormals flush;
        for (std::uint64_t seen = 0;;) {
            std::unique_lock<std::mutex> lock(state_);
            begin_.wait(lock, [&] { return round_ != seen && index < helpers_; });
            seen = round_;
            lock.unlock();
            units_->work();
            lock.lock();
            if (--busy_ == 0) end_.notify_one();
        }
    }

    std::mutex calls_, state_;
    std::condition_variable begin_, end_;
    std::vector<std::thread> threads_;
    Units* units_ = nullptr;
    std::uint64_t round_ = 0;
    std::size_t helpers_ = 0, busy_ = 0;
};

// Never destroyed: its threads wait until the process ends. A forked child has none of them, and locks in
// whatever state they were in: it forgets the pool and begins with a new one.
std::atomic<Pool*> pool{nullptr};

Pool& current() {
    Pool* found = pool;
    if (found) return *found;
    auto made = std::make_unique<Pool>();
    return *(pool.compare_exchange_strong(found, made.get()) ? made.release() : found);
}

// The functions of OpenMP that PyTorch's own operators run on, where PyTorch is loaded: after an operator the threads of
// its team spin for some milliseconds on the cores that a pool's threads would need. `parallel` (GOMP_parallel) calls a
// function on each thread of the calling thread's team, of the default size for 0. Null in a forked child, whose team
// has no threads.
std::atomic<void (*)(void (*)(void*), void*, unsigned, unsigned)> parallel{nullptr};
std::atomic<int (*)()> team_size{nullptr}, place_in_team{nullptr};

#if !defined(_WIN32)
void forget() { pool = nullptr, parallel = nullptr; }

template <class Function>
void find(void* library, const char* name, std::atomic<Function>& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
}

const int registered = [] {
    if (void* const torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD)) {
        find(torch, "omp_get_num_threads", team_size), find(torch, "omp_get_thread_num", place_in_team);
        if (team_size && place_in_team) find(torch, "GOMP_parallel", parallel);
    }
    return pthread_atfork(nullptr, nullptr, forget);
}();
#endif

struct Shared {
    Units& units;
    std::atomic<std::int64_t> places;

    static void join(void* shared) {
        const FlushDenormals flush;
        auto& self = *static_cast<Shared*>(shared);
        if (self.places-- > 0) self.units.work();
    }
};

// The first `most` threads of a team of OpenMP, as a team.
struct Together {
    const std::function<void(Team&, int)>& body;
    const int most;
    Team team{1};

    static void join(void* together) {
        const FlushDenormals flush;
        auto& self = *static_cast<Together*>(together);
        const int member = place_in_team.load()(), members = std::min(team_size.load()(), self.most);
        if (member >= members) return;
        self.team.set_members(members);  // each member the same
        self.body(self.team, member);
    }
};

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
    Units all{body, units, bytes};
    const std::int64_t most = std::min<std::int64_t>(threads, units);
    const auto on_each = parallel.load();
    if (most > 1 && on_each) {
        Shared shared{all, {most}};
        FlushDenormals::paused([&] { on_each(Shared::join, &shared, 0, 0); });
    } else if (most > 1) {
        current().run(all, static_cast<std::size_t>(most - 1));
    }
    return all.work();  // the rest
}

void Team::yield() { std::this_thread::yield(); }

void run_team(int threads, const std::function<void(Team&, int)>& body) {
    const auto on_each = parallel.load();
    if (threads > 1 && on_each) {
        Together together{body, threads};
        FlushDenormals::paused([&] { on_each(Together::join, &together, 0, 0); });
    } else if (threads > 1) {
        current().run(threads, body);
    } else {
        Team alone(1);
        body(alone, 0);
    }
}

void* own_memory(std::size_t bytes) { return own.at_least(bytes); }

void release_own_memory() { own.release_if_large(); }
