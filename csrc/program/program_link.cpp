// The two ops of a layer with cold neurons that another side computes.
#include <cstring>

#include "program/program.h"

namespace hc {

void Program::post(std::shared_ptr<FlagLink> link, const Mailbox& box, const Posted& from) {
    const auto once = [this] { return int64_t(count(kTokens) > 0); };
    const auto give_up = [pool = pool_.get()] { return pool->ending(); };
    step(once, [=](int64_t, const Scratch&) { link->wait_idle(box.layer, give_up); });
    step([this] { return count(kTokens); },
         [=](int64_t t, const Scratch&) {
             std::memcpy(box.x + t * box.dim, from.x + t * box.dim, size_t(box.dim) * 4);
             if (box.experts) {
                 const int64_t at = t * box.experts;
                 std::memcpy(box.ids + at, from.ids + at, size_t(box.experts) * 4);
                 std::memcpy(box.factors + at, from.factors + at, size_t(box.experts) * 4);
             }
             if (!box.mask || t >= batch_.decode_count()) return;
             const uint64_t* words = from.mask + (t + 1) * from.mask_words - box.words;
             std::memcpy(box.mask + t * box.words, words, size_t(box.words) * 8);
         });
    step(once, [=](int64_t, const Scratch&) {
        std::memcpy(box.counts, batch_.counts, 4 * sizeof(int32_t));
        link->post(box.layer);
    });
}

void Program::collect(std::shared_ptr<FlagLink> link, const Mailbox& box, float* out) {
    const auto give_up = [pool = pool_.get()] { return pool->ending(); };
    step([this] { return int64_t(count(kTokens) > 0); },
         [=](int64_t, const Scratch&) { link->wait_answered(box.layer, give_up); });
    add(out, box.y, box.dim);
}

}  // namespace hc
