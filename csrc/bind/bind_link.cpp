// The link between the two sides of a hybrid model, and the ops of both.
#include "bind/bind.h"
#include "program/link.h"

namespace hc {
namespace {

using Counts = Array<int32_t>;

// Gives up a wait when Python's signal handler raises; see check_signals().
FlagLink::GiveUp give_up_on_signals() {
    const std::function<void()> check = check_signals();
    if (!check) return {};
    return [check] {
        check();
        return false;
    };
}

Mailbox mailbox_of(BoundProgram& p, int layer, const Floats& x, const Floats& y, const Maybe<uint64_t>& mask,
                   const Counts& counts) {
    const int64_t rows = p.rows(kTokens), dim = width_of(x), decode = std::min<int64_t>(rows, kMaxDecodeRows);
    Mailbox box{};
    box.layer = layer;
    box.counts = data_of(counts, "mailbox: counts", 4, 1);
    box.x = data_of(x, "mailbox: x", rows, dim);
    box.y = data_of(y, "mailbox: y", rows, dim);
    box.dim = dim;
    box.words = mask ? width_of(*mask) : 0;
    box.mask = mask ? data_of(*mask, "mailbox: mask", decode, box.words) : nullptr;
    return box;
}

void bind_post(BoundProgram& p, std::shared_ptr<FlagLink> link, int layer, const Floats& box_x,
               const Floats& box_y, const Maybe<uint64_t>& box_mask, const Counts& counts, const Floats& x,
               const Maybe<uint64_t>& mask, const Maybe<int32_t>& box_ids, const Maybe<float>& box_factors,
               const Maybe<int32_t>& ids, const Maybe<float>& factors) {
    Mailbox box = mailbox_of(p, layer, box_x, box_y, box_mask, counts);
    const int64_t rows = p.rows(kTokens), words = mask ? width_of(*mask) : 0;
    if (words < box.words || mask.has_value() != box_mask.has_value())
        refuse("post: a mask of " + std::to_string(words) + " words, and the mailbox has " +
               std::to_string(box.words));
    const int64_t decode = std::min<int64_t>(rows, kMaxDecodeRows);
    const uint64_t* masks = mask ? data_of(*mask, "post: mask", decode, words) : nullptr;
    Program::Posted from{data_of(x, "post: x", rows, box.dim), masks, words, nullptr, nullptr};
    const bool has_experts = ids && factors && box_ids && box_factors;
    if (!has_experts && (ids || factors || box_ids || box_factors))
        refuse("post: chosen experts, and a mailbox without room for them, or the other way round");
    if (has_experts) {
        box.experts = width_of(*box_ids);
        box.ids = data_of(*box_ids, "mailbox: ids", rows, box.experts);
        box.factors = data_of(*box_factors, "mailbox: factors", rows, box.experts);
        from.ids = data_of(*ids, "post: ids", rows, box.experts);
        from.factors = data_of(*factors, "post: factors", rows, box.experts);
    }
    p.program.post(std::move(link), box, from);
}

void bind_collect(BoundProgram& p, std::shared_ptr<FlagLink> link, int layer, const Floats& box_x,
                  const Floats& box_y, const Maybe<uint64_t>& box_mask, const Counts& counts,
                  const Floats& out) {
    const Mailbox box = mailbox_of(p, layer, box_x, box_y, box_mask, counts);
    p.program.collect(std::move(link), box, data_of(out, "collect: out", p.rows(kTokens), box.dim));
}

// Runs without the GIL until the link ends.
void bind_serve(Link& link, const std::vector<std::pair<int, BoundProgram*>>& layers) {
    ColdLayers cold;
    for (const auto& [layer, program] : layers) {
        if (!program) refuse("serve: a program is None");
        cold.push_back({layer, [program = program] { program->program.run(); }});
    }
    nb::gil_scoped_release release;
    serve(link, cold);
}

using Moments = std::vector<std::tuple<int, int, int64_t>>;

Moments moments(const Link& link) {
    Moments moments;
    for (const Mark& mark : link.marks.taken())
        moments.push_back({mark.moment, mark.layer, mark.nanoseconds});
    return moments;
}

}  // namespace

void bind_link(nb::module_& m, nb::class_<BoundProgram>& program) {
    using Release = nb::call_guard<nb::gil_scoped_release>;
    nb::exception<LinkError>(m, "LinkError", PyExc_RuntimeError);
    nb::class_<Link>(m, "Link")
        .def("wait_posted", &Link::wait_posted, "layer"_a, Release())
        .def("answer", &Link::answer, "layer"_a, Release())
        .def("fail", &Link::fail, "reason"_a, Release())
        .def("stop", &Link::stop, Release())
        .def_prop_ro("ended", &Link::ended)
        .def(
            "start_marks", [](Link& link, size_t capacity) { link.marks.start(capacity); }, "capacity"_a)
        .def("stop_marks", [](Link& link) { link.marks.stop(); })
        .def(
            "mark", [](Link& link, int moment, int layer) { link.marks.add(moment, layer); }, "moment"_a,
            "layer"_a)
        .def("marks", &moments);
    nb::class_<FlagLink, Link>(m, "FlagLink")
        .def(nb::init<double>(), "timeout_seconds"_a)
        .def(
            "wait_idle",
            [](FlagLink& link, int layer) {
                const FlagLink::GiveUp give_up = give_up_on_signals();
                nb::gil_scoped_release release;
                link.wait_idle(layer, give_up);
            },
            "layer"_a)
        .def("post", &FlagLink::post, "layer"_a, Release())
        .def(
            "wait_answered",
            [](FlagLink& link, int layer) {
                const FlagLink::GiveUp give_up = give_up_on_signals();
                nb::gil_scoped_release release;
                return link.wait_answered(layer, give_up);
            },
            "layer"_a);
    program
        .def("post", &bind_post, "link"_a, "layer"_a, "box_x"_exact, "box_y"_exact, "box_mask"_maybe,
             "counts"_exact, "x"_exact, "mask"_maybe, "box_ids"_maybe, "box_factors"_maybe, "ids"_maybe,
             "factors"_maybe)
        .def("collect", &bind_collect, "link"_a, "layer"_a, "box_x"_exact, "box_y"_exact, "box_mask"_maybe,
             "counts"_exact, "out"_exact);
    m.def("serve", &bind_serve, "link"_a, "layers"_a);
}

}  // namespace hc
