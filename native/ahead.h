// Rows of tensors on their way from memory while products are computed: they lie too far apart for the hardware to
// see them coming. They go as far as the second cache: the states that the products go through fill the first.

#pragma once

#include "factor.h"

namespace HR_ISA {

class Ahead {
public:
    void clear() { count_ = at_ = 0; }

    // A span's rows of `width` elements, if there is such a tensor and such a span.
    void add(const View& x, Span span, int width) {
        if (!x || span.n <= 0) return;
        const int bytes = static_cast<int>(width * View::size(x.half));
        rows_[count_++] = {x.row(span.first), x.token * View::size(x.half), (bytes + LINE - 1) / LINE, span.n};
        if (count_ == 1) begin();
    }

    HR_INLINE void some() {
        for (int i = 0; i < AT_A_TIME && at_ < count_; i++) {
            __builtin_prefetch(row_ + line_ * LINE, 0, 2);
            if (++line_ < rows_[at_].lines) continue;
            line_ = 0;
            row_ += rows_[at_].stride;
            if (--left_ == 0 && ++at_ < count_) begin();
        }
    }

private:
    static constexpr int LINE = 64, MOST = 10, AT_A_TIME = 32 / Factor::STEP;  // half as many bytes in bfloat16
    struct Rows {
        const char* p;
        Stride stride;
        int lines, rows;
    };

    void begin() { row_ = rows_[at_].p, left_ = rows_[at_].rows, line_ = 0; }

    Rows rows_[MOST];
    int count_ = 0, at_ = 0, line_ = 0, left_ = 0;
    const char* row_ = nullptr;
};

// To finish a block of a product with.
struct Fetch {
    Ahead* ahead;
    template <int NV>
    HR_INLINE void operator()(Block<NV>&, int, int) const {
        ahead->some();
    }
};

}  // namespace HR_ISA
