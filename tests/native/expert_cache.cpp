// Experts that come from a file into places and go again, for the thread sanitizer too:
//     hotcold_expert_cache      exit 0: what steps use are the experts that they named, read by threads and
//     by rings, and reads of the disk's second queue wait, move up and are called off; 1: not so
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "disk/expert_cache.h"
#include "expect.h"
#include "test_file.h"

using namespace hc;

namespace {

constexpr int64_t kExperts = 24, kSlots = 7, kChosen = 3, kLayers = 2, kParts = 2;
constexpr int64_t kRows = 37, kColumns = 64, kRowBytes = 4 * kColumns, kPartBytes = kRows * kRowBytes;
constexpr int kSteps = 400;

using Experts = std::vector<int32_t>;
using Clock = std::chrono::steady_clock;

bool never() { return false; }
bool at_once() { return true; }

int64_t offset_of(int64_t layer, int64_t part, int64_t expert) {
    return ((layer * kParts + part) * kExperts + expert) * kPartBytes + 100;  // no block begins with a row
}
uint8_t value_at(int64_t at) { return uint8_t(uint64_t(at) * 2654435761u >> 11); }

// Writes all layers' experts.
void write_experts(const std::filesystem::path& path) {
    std::ofstream file(path, std::ios::binary);
    for (int64_t at = 0; at < offset_of(kLayers, 0, 0); ++at) file.put(char(value_at(at)));
    expect(bool(file.flush()), "the file cannot be written");
}

struct Layer {
    int64_t number;
    std::unique_ptr<ExpertCache> cache;
    std::shared_ptr<Memory> slots[kParts];

    Layer(const std::shared_ptr<Disk>& disk, int file, int64_t layer)
        : number(layer), cache(std::make_unique<ExpertCache>(disk, "the file", kExperts, kSlots)) {
        Arena arena;
        for (int64_t part = 0; part < kParts; ++part) {
            slots[part] = arena.take(size_t(kSlots * kPartBytes));
            CachePart one{};
            one.memory = slots[part];
            one.slot.rows.base = slots[part]->data();
            one.slot.rows.stride = kRowBytes;
            one.slot.rows.count = kRows;
            one.slot.rows.cols = kColumns;
            one.slot.rows.type = F32;
            one.stride = kPartBytes;
            one.file = file;
            one.rows = kRows;
            one.row_bytes = kRowBytes;
            for (int64_t i = 0; i < kExperts; ++i) one.offsets.push_back(offset_of(layer, part, i));
            cache->add(std::move(one));
        }
    }

    bool holds(int64_t expert) const {
        for (int64_t part = 0; part < kParts; ++part) {
            const uint8_t* at = slots[part]->data() + cache->slot(expert) * kPartBytes;
            const int64_t from = offset_of(number, part, expert);
            for (int64_t i = 0; i < kPartBytes; ++i)
                if (at[i] != value_at(from + i)) return false;
        }
        return true;
    }
};

Experts drawn(std::mt19937& random) {
    Experts found;
    while (int64_t(found.size()) < kChosen) {
        const auto expert = int32_t(random() % kExperts);
        if (std::find(found.begin(), found.end(), expert) == found.end()) found.push_back(expert);
    }
    std::sort(found.begin(), found.end());
    return found;
}

// How many of them were not used, or used twice, or were others in memory.
int64_t wrong_uses(Layer& layer, const Experts& experts) {
    int64_t wrong = 0, used = 0;
    for (;;) {
        for (const int32_t expert : experts)
            if (layer.cache->in_load_batch(expert)) {
                ++used;
                wrong += !layer.holds(expert);
            }
        if (!layer.cache->unfinished()) break;
        layer.cache->next(never);
    }
    layer.cache->end();
    return wrong + std::abs(used - int64_t(experts.size()));
}

void steps(int file, ReadWay way, bool direct) {
    const auto disk = std::make_shared<Disk>(3, direct, way);
    const int number = disk->add(file);
    std::vector<Layer> layers;
    for (int64_t i = 0; i < kLayers; ++i) layers.emplace_back(disk, number, i);
    layers[0].cache->fill(Experts{5, 1, 7}, 1, never);
    std::mt19937 random(1);
    int64_t wrong = 0;
    for (int step = 0; step < kSteps; ++step) {
        Layer& layer = layers[size_t(step % kLayers)];
        const Experts experts = drawn(random);
        layer.cache->begin(experts, nullptr, never);
        if (step % 17 == 0) layer.cache->next(at_once);  // the step ends in its midst
        if (step % 17 == 0) continue;
        if (step % 29 == 0) ++step;  // the one after it ends before it comes to its layer
        wrong += wrong_uses(layer, experts);
    }
    expect(!wrong, std::to_string(wrong) + " uses of experts were wrong");
}

// Memory for the parts of some neighbouring experts, to which several reads go: the last one stays there.
struct OnePlace {
    std::shared_ptr<Memory> memory;
    CachePart part{};
    int64_t bytes;

    OnePlace(int file, int64_t experts) : bytes(experts * kPartBytes) {
        Arena arena;
        memory = arena.take(size_t(bytes));
        part.memory = memory;
        part.slot.rows.base = memory->data();
        part.slot.rows.stride = kRowBytes;
        part.slot.rows.count = experts * kRows;
        part.slot.rows.cols = kColumns;
        part.slot.rows.type = F32;
        part.file = file;
        part.rows = experts * kRows;
        part.row_bytes = kRowBytes;
        for (int64_t i = 0; i < kExperts; ++i) part.offsets.push_back(offset_of(0, 0, i));
    }
    std::shared_ptr<Arrival> read(Disk& disk, int64_t expert, bool may_wait) const {
        auto arrival = std::make_shared<Arrival>(may_wait);
        std::vector<DiskRead> reads;
        part.add_reads(0, expert, 0, part.rows, arrival, reads);
        disk.read(std::move(reads));
        return arrival;
    }
    bool holds(int64_t expert) const {
        for (int64_t i = 0; i < bytes; ++i)
            if (memory->data()[i] != value_at(offset_of(0, 0, expert) + i)) return false;
        return true;
    }
};

// One thread reads one part after another, so the last expert in memory tells their order.
void second_queue(int file) {
    Disk disk(1, false, ReadWay::kThreads);
    expect(disk.threads() == 1, "one thread is needed");
    const OnePlace slot(disk.add(file), 1);
    for (const bool promotes : {false, true}) {
        disk.hold(true);
        const auto first = slot.read(disk, 1, true), second = slot.read(disk, 2, true);
        const auto needed = slot.read(disk, 3, false);
        if (promotes) disk.promote(*second);
        disk.hold(false);
        for (const auto& each : {first, second, needed})
            expect(disk.wait(*each, never) && !disk.error_of(*each), "a part was not read");
        expect(slot.holds(promotes ? 1 : 2), "the order of reads is another one");
    }
    const int64_t reads = disk.counts().reads;
    for (const bool promotes : {false, true}) {
        disk.hold(true);
        const auto wanted = slot.read(disk, 4, false), dropped = slot.read(disk, 5, true);
        if (promotes) disk.promote(*dropped);
        expect(disk.call_off(*dropped) == kPartBytes, "called off reads have other bytes");
        disk.hold(false);
        expect(disk.wait(*wanted, never) && disk.arrived(*dropped), "a read that was called off is left");
        expect(disk.error_of(*dropped) == kDropped && slot.holds(4), "a read was not called off");
    }
    expect(disk.counts().reads == reads + 2, "reads that were called off were begun");
}

// Once reads are called off, their place belongs to others, also where they are under way.
void called_off_under_way(int file, ReadWay way, bool direct) {
    Disk disk(3, direct, way);
    const OnePlace slot(disk.add(file), kExperts / 2);
    std::mt19937 random(2);
    int64_t changed = 0;
    for (int i = 0; i < kSteps / 4; ++i) {
        const auto start = Clock::now();
        disk.wait(*slot.read(disk, i % (kExperts / 2), true), never);
        const Clock::duration whole = Clock::now() - start;
        const auto dropped = slot.read(disk, i % (kExperts / 2), true);
        const auto until = Clock::now() + whole * int(random() % 100) / 100;
        while (Clock::now() < until) {
        }
        disk.call_off(*dropped);
        std::fill_n(slot.memory->data(), slot.bytes, uint8_t(i));
        disk.wait(*dropped, never);
        for (int64_t at = 0; at < slot.bytes; ++at) changed += slot.memory->data()[at] != uint8_t(i);
    }
    expect(!changed, std::to_string(changed) + " bytes came after their read was called off");
}

}  // namespace

int main() {
    const TestFile file(write_experts);
    expect(file.number() >= 0, "the file cannot be opened");
    for (const ReadWay way : {ReadWay::kThreads, ReadWay::kRings}) {
        if (way == ReadWay::kRings && why_no_rings()) continue;
        for (const bool direct : {false, true}) {
            steps(file.number(), way, direct);
            called_off_under_way(file.number(), way, direct);
        }
    }
    second_queue(file.number());
    std::printf("expert cache: %d failed\n", failures);
    return failures ? 1 : 0;
}
