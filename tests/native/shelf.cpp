// Experts that come from a file into places and go again, for the thread sanitizer too:
//     hotcold_shelf      exit 0: what steps use are the experts that they named, read by threads and by
//     rings, with guesses that are right, wrong and given up; 1: not so
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "disk/shelf.h"
#include "expect.h"
#include "test_file.h"

using namespace hc;

namespace {

constexpr int64_t kExperts = 24, kPlaces = 7, kChosen = 3, kLayers = 2, kParts = 2;
constexpr int64_t kRows = 37, kColumns = 64, kRowBytes = 4 * kColumns, kPartBytes = kRows * kRowBytes;
constexpr int kSteps = 400;

using Experts = std::vector<int32_t>;

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
    std::unique_ptr<Shelf> shelf;
    std::shared_ptr<Memory> places[kParts];

    Layer(const std::shared_ptr<Disk>& disk, int file, int64_t layer, Guessing guessing)
        : number(layer), shelf(std::make_unique<Shelf>(disk, "the file", kExperts, kPlaces)) {
        Arena arena;
        for (int64_t part = 0; part < kParts; ++part) {
            places[part] = arena.take(size_t(kPlaces * kPartBytes));
            ShelfPart one{};
            one.memory = places[part];
            one.place.rows.base = places[part]->data();
            one.place.rows.stride = kRowBytes;
            one.place.rows.count = kRows;
            one.place.rows.cols = kColumns;
            one.place.rows.type = F32;
            one.stride = kPartBytes;
            one.file = file;
            one.rows = kRows;
            one.row_bytes = kRowBytes;
            for (int64_t i = 0; i < kExperts; ++i) one.offsets.push_back(offset_of(layer, part, i));
            shelf->add(std::move(one));
        }
        shelf->set_guessing(guessing);
    }

    bool holds(int64_t expert) const {
        for (int64_t part = 0; part < kParts; ++part) {
            const uint8_t* at = places[part]->data() + shelf->place(expert) * kPartBytes;
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
            if (layer.shelf->in_wave(expert)) {
                ++used;
                wrong += !layer.holds(expert);
            }
        if (!layer.shelf->unfinished()) break;
        layer.shelf->next(never);
    }
    layer.shelf->end();
    return wrong + std::abs(used - int64_t(experts.size()));
}

void steps(int file, ReadWay way, bool direct, Guessing guessing) {
    const auto disk = std::make_shared<Disk>(3, direct, way);
    const int number = disk->add(file);
    std::vector<Layer> layers;
    for (int64_t i = 0; i < kLayers; ++i) layers.emplace_back(disk, number, i, guessing);
    layers[0].shelf->fill(Experts{5, 1, 7}, 1, never);
    std::mt19937 random(1);
    Experts next = drawn(random);
    int64_t wrong = 0;
    for (int step = 0; step < kSteps; ++step) {
        Layer& layer = layers[size_t(step % kLayers)];
        const Experts experts = next;
        layer.shelf->begin(experts, nullptr, never);
        next = drawn(random);
        Shelf& following = *layers[size_t((step + 1) % kLayers)].shelf;
        if (following.wants_guess()) following.guess(step % 3 ? next : drawn(random));
        if (step % 17 == 0) layer.shelf->next(at_once);  // the step ends in its midst
        if (step % 17 == 0) continue;
        if (step % 29 == 0) ++step;  // the one after it ends before it comes to its layer
        wrong += wrong_uses(layer, experts);
    }
    expect(!wrong, std::to_string(wrong) + " uses of experts were wrong");
    const Waves::Counts counts = layers[1].shelf->counts();
    const bool guesses = counts.guessed > counts.right && counts.right > 0;
    expect(guesses == (guessing == Guessing::kOn), "there were other guesses");
}

}  // namespace

int main() {
    const TestFile file(write_experts);
    expect(file.number() >= 0, "the file cannot be opened");
    for (const ReadWay way : {ReadWay::kThreads, ReadWay::kRings}) {
        if (way == ReadWay::kRings && why_no_rings()) continue;
        for (const bool direct : {false, true})
            for (const Guessing guessing : {Guessing::kOff, Guessing::kOn})
                steps(file.number(), way, direct, guessing);
    }
    std::printf("shelf: %d failed\n", failures);
    return failures ? 1 : 0;
}
