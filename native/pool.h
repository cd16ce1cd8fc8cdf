// The threads that share a call's work: PyTorch's where it is loaded, otherwise a few of our own, kept between calls.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

// Calls body(i, memory) for i = 0 … units − 1, on up to `threads` threads of which the caller is one. Each has `bytes`
// of memory of its own, aligned to a cache line, not cleared. Which thread does which unit is not determined. While
// threads of our own work for another call, the caller does all units: no call waits for another.
// Returns false if memory is lacking; then not all units have run.
bool run_units(std::int64_t units, int threads, std::size_t bytes,
               const std::function<void(std::int64_t, void*)>& body);

// Asks the system to back memory that is fresh with large pages: one fault for 2 MiB and not for each 4 KiB of them. Only
// a hint, for memory of any origin.
void in_large_pages(const void* p, std::size_t bytes);
