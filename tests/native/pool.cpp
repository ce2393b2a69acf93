// The thread pool without kernels:
//     hotcold_pool [threads]      exit 0: every piece ran once and in its step, and what ends a run early
//     ends it cleanly; 1: something did not
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "expect.h"
#include "pool/threads.h"
#include "program/even_cut.h"

using namespace hc;

namespace {

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// Returns what a run throws; "" when it throws nothing.
std::string thrown(Pool& pool, const std::vector<Step>& steps,
                   const std::function<void()>& check_interrupt = {}) {
    try {
        pool.run(steps, nullptr, check_interrupt);
    } catch (const std::exception& error) {
        return error.what();
    }
    return "";
}

// Each step adds one to every cell, if the step before did: what lies there counts the steps that ran in
// order.
struct Counting {
    explicit Counting(size_t cells) : cell(cells) {}
    Step step(int64_t pieces, int number) {
        return {[pieces] { return pieces; },
                [this, pieces, number](int64_t piece, const Scratch&) {
                    for (auto i = size_t(piece); i < cell.size(); i += size_t(pieces))
                        if (cell[i] == number) cell[i] = number + 1;
                }};
    }
    bool all(int number) const {
        for (int c : cell)
            if (c != number) return false;
        return true;
    }
    std::vector<int> cell;
};

void test_order(Pool& pool) {
    std::mt19937 random(1);
    for (int round = 0; round < 200; ++round) {
        Counting counting(97);
        std::vector<Step> steps;
        for (int s = 0; s < 40; ++s) steps.push_back(counting.step(int64_t(1) << (random() % 9) >> 1, s));
        // Steps without pieces leave the cells as they are.
        int counted = 0;
        std::vector<Step> numbered;
        for (const Step& s : steps) numbered.push_back(s.pieces() ? counting.step(s.pieces(), counted++) : s);
        pool.run(numbered, nullptr);
        expect(counting.all(counted), "a step ran before the one before it had ended");
    }
}

void test_each_piece_runs_once(Pool& pool) {
    for (int64_t pieces : {1, 2, 7, 64, 1 << 12, (1 << 20) + 3}) {
        std::vector<std::atomic<int>> runs(static_cast<size_t>(pieces));
        const Step step{[=] { return pieces; },
                        [&](int64_t piece, const Scratch&) { ++runs[size_t(piece)]; }};
        pool.run({step, step}, nullptr);
        int64_t twice = 0;
        for (const auto& r : runs) twice += r == 2;
        expect(twice == pieces,
               std::to_string(pieces) + " pieces, two steps: " + std::to_string(twice) + " ran twice");
    }
}

void test_too_many_pieces(Pool& pool) {
    const auto none = [](int64_t, const Scratch&) {};
    const std::string seen = thrown(pool, {{[] { return int64_t(1) << 32; }, none}});
    expect(seen.find("4294967296 pieces") != std::string::npos && seen.find("4294967295") != seen.npos,
           "a step of 2^32 pieces: '" + seen + "'");
}

// An exception in each place where a step's functions are called ends the run; the next one is complete.
void test_throwing(Pool& pool) {
    const auto failure = [] { throw std::runtime_error("a step failed"); };
    for (int64_t pieces : {1, 3, 500})
        for (int where = 0; where < 5; ++where) {
            std::atomic<int> ran{0}, after{0};
            const auto count = [&](int64_t, const Scratch&) { ++ran; };
            const auto several = [=] { return pieces; };
            const auto one = [] { return int64_t(1); };
            std::vector<Step> steps{{several, count}, {one, count}};
            Step bad{several, count};
            if (where == 0)
                bad.pieces = [=] {
                    failure();
                    return pieces;
                };
            else if (where == 1)  // asked by announce
                bad.reads = [=](int64_t, int64_t) {
                    failure();
                    return Span{};
                };
            else
                bad.run = [=](int64_t piece, const Scratch&) {
                    if (where == 4 || piece == (where == 2 ? 0 : pieces - 1)) failure();
                };
            steps.push_back(bad);
            steps.push_back({[=] { return pieces; }, [&](int64_t, const Scratch&) { ++after; }});
            const std::string seen = thrown(pool, steps);
            const bool asked = where != 1 || (pool.threads() > 1 && pieces > 1);
            const std::string what = std::to_string(pieces) + " pieces, place " + std::to_string(where);
            expect(seen == (asked ? "a step failed" : ""), what + " threw '" + seen + "'");
            expect(after == (asked ? 0 : pieces), what + ": " + std::to_string(after) + " pieces after it");
            Counting counting(31);
            pool.run({counting.step(4, 0), counting.step(1, 1), counting.step(64, 2)}, nullptr);
            expect(counting.all(3), what + ": the run after it is incomplete");
        }
}

// Pieces that were not claimed when one failed are not run.
void test_failure_drops_the_rest(Pool& pool) {
    std::atomic<int> ran{0};
    const std::string seen = thrown(pool, {{[] { return int64_t(2000); },
                                            [&](int64_t, const Scratch&) {
                                                sleep_ms(1);
                                                ++ran;
                                                throw std::bad_alloc();
                                            }}});
    expect(!seen.empty() && ran < 1000, "after a failure " + std::to_string(ran) + " of 2000 pieces ran");
}

// `steps` last two seconds and more; the check ends them, asked by the calling thread alone.
void test_interrupt(Pool& pool, const char* what, const std::vector<Step>& steps, const std::atomic<int>& ran,
                    int most) {
    const std::thread::id caller = std::this_thread::get_id();
    int asked = 0;
    bool others = false;
    const std::string seen = thrown(pool, steps, [&] {
        others |= std::this_thread::get_id() != caller;
        if (++asked == 2) throw std::runtime_error("interrupted");
    });
    expect(seen == "interrupted" && asked == 2 && !others, std::string(what) + ": threw '" + seen + "'");
    expect(ran < most, std::string(what) + ": " + std::to_string(ran) + " pieces ran");
    Counting counting(31);
    pool.run({counting.step(4, 0), counting.step(1, 1), counting.step(64, 2)}, nullptr);
    expect(counting.all(3), std::string(what) + ": the run after it is incomplete");
}

void test_interrupts(Pool& pool) {
    std::atomic<int> ran{0};
    const auto slow = [&](int64_t, const Scratch&) {
        sleep_ms(1);
        ++ran;
    };
    const Step one{[] { return int64_t(1); }, slow};
    const auto many = [&](int64_t pieces) { return Step{[=] { return pieces; }, slow}; };
    test_interrupt(pool, "steps of one piece", std::vector<Step>(2000, one), ran, 1000);
    ran = 0;
    const int pieces = 16 * pool.threads();
    test_interrupt(pool, "steps of several pieces", std::vector<Step>(125, many(pieces)), ran, 62 * pieces);
    ran = 0;
    test_interrupt(pool, "one step", {many(2000 * pool.threads())}, ran, 1000 * pool.threads());

    // Another thread ends the first step, and so runs the others, while the calling one sleeps.
    if (pool.threads() == 1) return;
    ran = 0;
    const std::thread::id caller = std::this_thread::get_id();
    std::atomic<bool> joined{false}, left{false};
    std::vector<Step> steps(2000, one);
    steps.insert(steps.begin(), {[] { return int64_t(2); },
                                 [&](int64_t, const Scratch&) {
                                     if (std::this_thread::get_id() == caller) {
                                         while (!joined) std::this_thread::yield();
                                         sleep_ms(30);  // so that it sleeps beyond the first question
                                         left = true;
                                     } else if (!joined.exchange(true)) {
                                         while (!left) std::this_thread::yield();
                                         sleep_ms(5);
                                     }
                                 }});
    if (pool.threads() == 2) test_interrupt(pool, "steps of another thread", steps, ran, 1000);

    int asked = 0;
    pool.run({many(2)}, nullptr, [&] { ++asked; });
    expect(asked == 0, "a run of two milliseconds was asked whether to go on");
}

// A thread that takes long, as on a slow core: meanwhile others do all pieces but the one that it is at.
void test_a_slow_thread_delays_one_piece(Pool& pool) {
    if (pool.threads() == 1) return;
    constexpr int64_t pieces = 64;
    std::atomic<int64_t> done{0};
    int64_t seen = 0;
    pool.run({{[] { return pieces; },
               [&](int64_t piece, const Scratch&) {
                   for (int ms = 0; piece == 0 && done < pieces - 1 && ms < 20000; ++ms) sleep_ms(1);
                   if (piece == 0) seen = done;
                   ++done;
               }}},
             nullptr);
    expect(seen == pieces - 1,
           "beside a slow thread only " + std::to_string(seen) + " of 63 pieces were done");
}

// A step whose pieces wait for each other ends only if every sleeping thread is woken. The thread that ended
// the first step opens the second one.
void test_all_wake(Pool& pool) {
    const int64_t all = pool.threads();
    for (int round = 0; round < 5; ++round) {
        std::vector<std::atomic<int>> here(2);
        std::atomic<int> missed{0};
        const auto meet = [&](std::atomic<int>& n) {
            ++n;
            for (int ms = 0; n < all && ms < 20000; ++ms) sleep_ms(1);  // meanwhile others fall asleep
            missed += n < all;
        };
        std::vector<Step> steps;
        for (auto& n : here)
            steps.push_back({[=] { return all; }, [&](int64_t, const Scratch&) { meet(n); }});
        steps.insert(steps.begin() + 1,
                     {[] { return int64_t(1); }, [](int64_t, const Scratch&) { sleep_ms(2); }});
        sleep_ms(2);
        pool.run(steps, nullptr);
        expect(!missed, "a thread slept through a step");
    }
}

// Pieces of products' rows: each row is in one, in order; they begin at units, and are about as large.
void test_even_cuts() {
    std::mt19937 random(3);
    for (int round = 0; round < 5000; ++round) {
        std::vector<EvenCut::Part> parts;
        const size_t count = round % 2 ? 1 : 1 + random() % 4;
        const int threads = 1 + int(random() % 9);
        for (size_t i = 0; i < count; ++i) {
            const int64_t unit = 1 + int64_t(random() % 24);
            const int64_t rows = 1 + int64_t(random() % 3000), most = unit * (1 + int64_t(random() % 16));
            parts.push_back({rows, 1 + int64_t(random() % 500), unit, most});
        }
        const EvenCut cut(parts, threads);
        size_t part = 0;
        int64_t row = 0;
        for (int64_t piece = 0; piece < cut.pieces(); ++piece) {
            const EvenCut::Stretch begin = cut.stretch(piece, piece + 1);
            bool first = true;
            int64_t all = 0;
            cut.each(piece, [&](size_t i, int64_t from, int64_t n) {
                if (row == parts[part].rows) row = 0, ++part;
                expect(i == part && from == row && n > 0, "a piece does not begin where the last one ended");
                expect(from % parts[i].unit == 0, "a piece begins within a unit");
                if (first) expect(begin.part == i && begin.first == from, "a piece's stretch is another one");
                first = false;
                row += n;
                all += n;
            });
            expect(count > 1 || all <= parts[0].most, "a piece has more rows than it may");
        }
        expect(part + 1 == count && row == parts[part].rows, "rows are in no piece");
        const int64_t pieces = cut.pieces();
        expect(pieces < threads || pieces % threads == 0, "threads do not share the pieces evenly");
    }
}

// Failures and interrupts at any moment, for the thread sanitizer.
void test_any_moment(Pool& pool) {
    std::mt19937 random(2);
    for (int round = 0; round < 3000; ++round) {
        const int64_t bad = random() % 400;
        std::vector<Step> steps;
        for (int s = 0; s < 10; ++s) {
            const int64_t pieces = random() % 40;
            steps.push_back({[=] { return pieces; },
                             [=](int64_t piece, const Scratch& scratch) {
                                 scratch.local[0] = uint8_t(piece);
                                 if (s * 40 + piece == bad) throw std::runtime_error("a step failed");
                             },
                             [](int64_t, int64_t) { return Span{}; }});
        }
        const bool reached = bad % 40 < steps[size_t(bad / 40)].pieces();
        expect(thrown(pool, steps) == (reached ? "a step failed" : ""), "a failure was lost or made up");
    }
}

}  // namespace

int main(int argc, char** argv) {
    const int threads = argc > 1 ? std::atoi(argv[1]) : 3;
    Pool pool(threads);
    test_order(pool);
    test_each_piece_runs_once(pool);
    test_too_many_pieces(pool);
    test_a_slow_thread_delays_one_piece(pool);
    test_throwing(pool);
    test_failure_drops_the_rest(pool);
    test_interrupts(pool);
    test_all_wake(pool);
    test_even_cuts();
    test_any_moment(pool);
    std::printf("%d threads: %d failed\n", threads, failures);
    return failures ? 1 : 0;
}
