// The link between two sides without kernels, for the thread sanitizer too:
//     hotcold_link      exit 0: answers belong to their layers in any order, and both sides see each end; 1:
//     not so
#include "program/link.h"
#include "expect.h"

#include <cstdio>
#include <string>
#include <thread>

using namespace hc;

namespace {

void sleep_us(int us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

// A cold side that answers 1000 * layer + x; it dawdles now and then, and throws where x is negative.
struct Cold {
    explicit Cold(double timeout = 10) : link(timeout) {
        for (int layer : {2, 3, 7})
            layers.push_back({layer, [this, layer] {
                                  if (x % 5 == 0) sleep_us(x % 400);
                                  if (x < 0) throw std::runtime_error("x is negative");
                                  y = 1000 * layer + x;
                              }});
        thread = std::thread([this] { serve(link, layers); });
    }
    ~Cold() {
        link.stop();
        thread.join();
    }
    int ask(int layer, int value, int pause = 0) {
        link.wait_idle(layer);
        x = value;
        link.post(layer);
        if (pause) sleep_us(pause);
        link.wait_answered(layer);
        return y;
    }
    std::string error(int layer, int value) {
        try {
            ask(layer, value);
        } catch (const LinkError& found) {
            return found.what();
        }
        return "";
    }

    FlagLink link;
    ColdLayers layers;
    std::thread thread;
    int x = 0, y = 0;  // the mailbox
};

void steps() {
    Cold cold;
    cold.link.marks.start(1 << 10);
    for (int step = 0; step < 3000; ++step)
        for (int layer : {2, 3, 7}) {
            const int pause = step % 7 == 0 ? step % 300 : 0;  // then the cold side is first
            expect(cold.ask(layer, step, pause) == 1000 * layer + step, "an answer of another layer or step");
            if (layer == step % 20) break;  // the step ends early
        }
    const std::vector<Mark> marks = cold.link.marks.taken();
    expect(marks.size() == 1 << 10, "the ring is not full");
    for (size_t i = 1; i < marks.size(); ++i)
        expect(marks[i - 1].nanoseconds <= marks[i].nanoseconds, "marks out of order");
}

// The hot side goes away while a layer is out, as on Ctrl-C, and begins anew.
void interrupted_steps() {
    Cold cold;
    for (int step = 5; step < 500; step += 5) {
        cold.ask(2, step);
        cold.link.wait_idle(3);
        cold.x = step;
        cold.link.post(3);
        const bool answered = cold.link.wait_answered(3, [] { return true; });
        expect(cold.ask(2, step + 1) == 2001 + step, answered ? "after an answer" : "after giving up");
    }
}

void ends() {
    Cold failing;
    expect(failing.error(2, -1) == "layer 2: the cold side has ended: x is negative",
           "a failure is not told");
    expect(failing.error(2, 1) == "layer 2: the cold side has ended: x is negative", "or not told again");
    Cold disordered;
    const std::string what = disordered.error(3, 1);
    expect(what.find("a layer that is not its first one") != std::string::npos, "layer 3 first: " + what);
    FlagLink nobody(0.02);
    nobody.post(4);
    try {
        nobody.wait_answered(4);
        expect(false, "nobody has answered");
    } catch (const LinkError& found) {
        expect(std::string(found.what()) == "layer 4: the cold side has given no answer for 20 ms",
               found.what());
    }
}

void stopped_while_waiting() {
    for (int us : {0, 50, 1000, 5000}) {
        FlagLink link(10);
        std::thread cold([&] { expect(!link.wait_posted(1), "posted by nobody"); });
        std::thread hot([&] {
            try {
                link.wait_idle(1);
                link.wait_answered(1);  // there is nothing to wait for
            } catch (const LinkError&) {
            }
        });
        sleep_us(us);
        link.stop();
        cold.join();
        hot.join();
        FlagLink posted(10);
        posted.post(6);
        std::thread waiting([&] {
            try {
                posted.wait_answered(6);
                expect(false, "answered by nobody");
            } catch (const LinkError&) {
            }
        });
        sleep_us(us);
        posted.stop();
        waiting.join();
    }
}

}  // namespace

int main() {
    steps();
    interrupted_steps();
    ends();
    stopped_while_waiting();
    return failures ? 1 : 0;
}
