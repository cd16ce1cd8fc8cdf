// How a call of the C ABI computes: with denormals as zeros, and without exceptions.

#pragma once

#include <new>

#include "denormals.h"
#include "headrace.h"

template <class F>
int guarded(F f) {
    const FlushDenormals flush;
    try {
        return f();
    } catch (const std::bad_alloc&) {
        return HR_NO_MEMORY;
    }
}
