// Devices of the Vulkan drivers.
#include <nanobind/stl/map.h>

#include <cstring>

#include "bind/bind.h"
#include "vulkan/open_rows.h"
#include "vulkan/program.h"
#include "vulkan/staging.h"

namespace hc {
namespace vulkan {
namespace {

using Bytes = Array<const uint8_t>;

// A device, its memory, and the staging buffers for it.
struct OpenDevice {
    std::shared_ptr<Device> device;
    std::shared_ptr<Heap> heap;
    std::shared_ptr<Staging> staging;
    OpenDevice(int index, std::optional<uint64_t> budget)
        : device(std::make_shared<Device>(index)),
          heap(std::make_shared<Heap>(device, budget)),
          staging(std::make_shared<Staging>(heap)) {}
};

Where where_of(const std::string& name) {
    if (name == "device") return Where::kDevice;
    if (name == "upload") return Where::kUpload;
    if (name == "download") return Where::kDownload;
    refuse("memory '" + name + "': choose device, upload or download");
}

std::vector<uint32_t> words_of(const nb::bytes& spirv) {
    if (!spirv.size() || spirv.size() % 4) refuse("a SPIR-V module is whole words");
    std::vector<uint32_t> words(spirv.size() / 4);
    std::memcpy(words.data(), spirv.c_str(), spirv.size());
    return words;
}

void check_inside(const Memory& memory, uint64_t offset, uint64_t bytes) {
    if (offset > memory.size() || bytes > memory.size() - offset)
        refuse("bytes " + std::to_string(offset) + " to " + std::to_string(offset + bytes) +
               " of a memory of " + std::to_string(memory.size()));
}

void bind_write(OpenDevice& self, std::shared_ptr<Memory> memory, uint64_t offset, const Bytes& data) {
    check_inside(*memory, offset, data.size());
    const CheckInterrupt check = check_signals();
    nb::gil_scoped_release release;
    self.staging->write(std::move(memory), offset, data.data(), data.size(), check);
}

void bind_read(OpenDevice& self, std::shared_ptr<Memory> memory, uint64_t offset,
               const Array<uint8_t>& data) {
    check_inside(*memory, offset, data.size());
    const CheckInterrupt check = check_signals();
    nb::gil_scoped_release release;
    self.staging->read(std::move(memory), offset, data.data(), data.size(), check);
}

void bind_clear(OpenDevice& self, std::shared_ptr<Memory> memory) {
    const CheckInterrupt check = check_signals();
    nb::gil_scoped_release release;
    self.staging->clear(std::move(memory), check);
}

std::shared_ptr<Pipeline> bind_pipeline(OpenDevice& self, const nb::bytes& spirv, uint32_t ranges,
                                        uint32_t push_bytes, const std::vector<int64_t>& constants,
                                        bool hardware_halves) {
    const std::vector<uint32_t> words = words_of(spirv);
    std::vector<uint32_t> values;
    for (int64_t constant : constants) values.push_back(uint32_t(constant));
    nb::gil_scoped_release release;
    return std::make_shared<Pipeline>(self.device, words, ranges, push_bytes, std::move(values),
                                      hardware_halves);
}

// A recorder with the arrays that it reads in every run.
struct BoundRecorder {
    Recorder recorder;
    std::optional<BatchArrays> arrays;
    bool finished = false;
    Recorder& open() {
        if (finished) refuse("this recorder has finished: take another one");
        return recorder;
    }
};

struct BoundVulkanProgram {
    std::shared_ptr<Program> program;
    std::optional<BatchArrays> arrays;
};

void bind_batch(BoundRecorder& r, std::shared_ptr<Memory> memory, const nb::object& batch, int64_t rows,
                const std::map<std::string, int64_t>& bounds) {
    const BatchArrays arrays(batch);
    BatchPlace place;
    place.memory = std::move(memory);
    place.batch = arrays.view();
    place.bounds = arrays.bounds();
    if (place.bounds.tokens < rows) refuse("a batch's arrays are shorter than its rows");
    place.bounds.tokens = rows;
    for (const auto& [name, most] : bounds) {
        if (name == "tokens")
            place.bounds.vocab = most;
        else if (name == "positions")
            place.bounds.positions = most;
        else if (name == "pages")
            place.bounds.pages = most;
        else if (name == "state_slots")
            place.bounds.keep_states(most);
        else
            refuse("a bound of '" + name + "': choose tokens, positions, pages or state_slots");
    }
    // In the order of csrc/shaders/batch.glsl.
    for (const Index* array :
         {&arrays.tokens, &arrays.positions, &arrays.sequence, &arrays.slots, &arrays.pages, &arrays.lengths,
          &arrays.logits_rows, &arrays.first_rows, &arrays.row_counts, &arrays.state_from, &arrays.state_to})
        place.add(array->data(), array->size());
    r.open().batch(std::move(place));
    r.arrays = arrays;
}

using RangeOf = std::tuple<std::shared_ptr<Memory>, uint64_t, uint64_t, bool>;

void bind_dispatch(BoundRecorder& r, std::shared_ptr<Pipeline> pipeline, const std::vector<RangeOf>& ranges,
                   const nb::bytes& push, uint32_t x, uint32_t y, uint32_t z) {
    std::vector<Range> bound_ranges;
    for (const auto& [memory, offset, bytes, written] : ranges)
        bound_ranges.push_back({memory, offset, bytes, written});
    const auto* bytes = reinterpret_cast<const uint8_t*>(push.c_str());
    r.open().dispatch(std::move(pipeline), std::move(bound_ranges), {bytes, bytes + push.size()}, {x, y, z});
}

BoundVulkanProgram bind_finish(BoundRecorder& r) {
    Recorder& recorder = r.open();
    r.finished = true;
    nb::gil_scoped_release release;
    std::shared_ptr<Program> finished = recorder.finish();
    Program* const program = finished.get();
    // A program waits for the device when it is destroyed: without the GIL, other Python threads run
    // meanwhile.
    const auto drop = [finished = std::move(finished)](Program*) mutable {
        nb::gil_scoped_release no_gil;
        finished.reset();
    };
    return {std::shared_ptr<Program>(program, drop), std::move(r.arrays)};
}

// Raises Python's own class with the byte counts.
void raise_memory_error(const std::exception_ptr& thrown, void* type) {
    try {
        std::rethrow_exception(thrown);
    } catch (const VulkanMemoryError& error) {
        nb::object instance = nb::borrow(static_cast<PyObject*>(type))(error.what());
        instance.attr("asked") = error.asked;
        instance.attr("allocated") = error.allocated;
        instance.attr("budget") = error.budget ? nb::object(nb::int_(error.budget)) : nb::none();
        PyErr_SetObject(static_cast<PyObject*>(type), instance.ptr());
    }
}

std::optional<nb::ndarray<nb::numpy, uint8_t>> bind_host(std::shared_ptr<Memory> memory) {
    if (!memory->host()) return {};
    auto* kept = new std::shared_ptr<Memory>(memory);
    nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::shared_ptr<Memory>*>(p); });
    const size_t shape[] = {memory->size()};
    return nb::ndarray<nb::numpy, uint8_t>(memory->host(), 1, shape, owner);
}

void bind_open_rows(const std::string& type, const Array<const uint8_t>& data, const Array<uint8_t>& codes,
                    const Array<uint8_t>& scales) {
    static const std::map<std::string, OpenedType> types{
        {"Q2_K", OpenedType::kQ2K}, {"Q3_K", OpenedType::kQ3K}, {"IQ4_XS", OpenedType::kIQ4XS}};
    const auto entry = types.find(type);
    if (entry == types.end()) refuse("rows of " + type + ": choose Q2_K, Q3_K or IQ4_XS");
    if (data.ndim() != 2 || codes.ndim() != 2 || scales.ndim() != 2)
        refuse("open_rows: [rows, bytes] are needed");
    const int64_t rows = int64_t(data.shape(0)),
                  supers = int64_t(data.shape(1)) / bytes_of_256(entry->second);
    if (supers < 1 || int64_t(data.shape(1)) != supers * bytes_of_256(entry->second))
        refuse("a row of " + std::to_string(data.shape(1)) + " bytes: whole blocks of " + type +
               " are needed");
    data_of(codes, "codes", rows, 128 * supers);
    data_of(scales, "scales", rows, 64 * supers);
    nb::gil_scoped_release release;
    open_rows(entry->second, data.data(), rows, 8 * supers, codes.data(), scales.data());
}

void bind_info(nb::module_& m) {
    nb::class_<DeviceInfo>(m, "VulkanDeviceInfo")
        .def_ro("index", &DeviceInfo::index)
        .def_ro("name", &DeviceInfo::name)
        .def_ro("kind", &DeviceInfo::kind)
        .def_ro("driver", &DeviceInfo::driver)
        .def_ro("api", &DeviceInfo::api)
        .def_ro("vendor", &DeviceInfo::vendor)
        .def_ro("device", &DeviceInfo::device)
        .def_ro("uuid", &DeviceInfo::uuid)
        .def_ro("memory_bytes", &DeviceInfo::memory_bytes)
        .def_ro("free_bytes", &DeviceInfo::free_bytes)
        .def_ro("unified", &DeviceInfo::unified)
        .def_ro("max_range", &DeviceInfo::max_range)
        .def_ro("max_allocation", &DeviceInfo::max_allocation)
        .def_ro("shared_bytes", &DeviceInfo::shared_bytes)
        .def_ro("problem", &DeviceInfo::problem);
    m.def("vulkan_devices", &list_devices, nb::call_guard<nb::gil_scoped_release>());
    m.def("vulkan_open_rows", &bind_open_rows, "type"_a, "data"_exact, "codes"_exact, "scales"_exact);
}

}  // namespace
}  // namespace vulkan

void bind_vulkan(nb::module_& m) {
    using namespace vulkan;
    using vulkan::Memory;
    using Release = nb::call_guard<nb::gil_scoped_release>;
    // Errors for the user: Python code need not convert them.
    const auto gpus = nb::module_::import_("hotcold.kernels.gpu");
    const auto error = nb::exception<VulkanError>(m, "VulkanError", gpus.attr("GPUError").ptr());
    const nb::tuple both = nb::make_tuple(error, gpus.attr("GPUMemoryError"));
    nb::object memory_error =
        nb::steal(PyErr_NewException("hotcold.kernels._native.VulkanMemoryError", both.ptr(), nullptr));
    m.attr("VulkanMemoryError") = memory_error;
    nb::register_exception_translator(&raise_memory_error, memory_error.ptr());
    bind_info(m);
    nb::class_<Memory>(m, "VulkanMemory")
        .def_prop_ro("nbytes", &Memory::size)
        .def_prop_ro("host", &bind_host, nb::rv_policy::automatic);  // the array keeps the memory alive
    nb::class_<Pipeline>(m, "VulkanPipeline");
    nb::class_<VulkanLink::Counts>(m, "VulkanLinkCounts")
        .def_ro("steps", &VulkanLink::Counts::steps)
        .def_ro("answered", &VulkanLink::Counts::answered)
        .def_ro("gave_up", &VulkanLink::Counts::gave_up)
        .def_ro("spins", &VulkanLink::Counts::spins);
    nb::class_<VulkanLink, Link>(m, "VulkanLink")
        .def_prop_ro("spin", &VulkanLink::spins)
        .def_prop_ro("counts", &VulkanLink::counts);
    nb::class_<StepCounts>(m, "VulkanStepCounts")
        .def_ro("dispatches", &StepCounts::dispatches)
        .def_ro("barriers", &StepCounts::barriers)
        .def_ro("submits", &StepCounts::submits);
    nb::class_<BoundVulkanProgram>(m, "VulkanProgram")
        .def("run",
             [](BoundVulkanProgram& self) {
                 const CheckInterrupt check = check_signals();
                 nb::gil_scoped_release release;
                 self.program->run(check);
             })
        .def_prop_ro("counts", [](BoundVulkanProgram& self) { return self.program->counts(); });
    nb::class_<BoundRecorder>(m, "VulkanRecorder")
        .def("batch", &bind_batch, "memory"_a, "batch"_a, "rows"_a, "bounds"_a,
             nb::sig("def batch(self, memory: VulkanMemory, batch: hotcold.kernels.backend.Batch, rows: int, "
                     "bounds: collections.abc.Mapping[str, int]) -> None"))
        .def("dispatch", &bind_dispatch, "pipeline"_a, "ranges"_a, "push"_a, "x"_a, "y"_a, "z"_a)
        .def(
            "copy",
            [](BoundRecorder& r, std::shared_ptr<Memory> source, uint64_t source_offset,
               std::shared_ptr<Memory> target, uint64_t target_offset, uint64_t nbytes) {
                r.open().copy({std::move(source), source_offset, nbytes, false},
                              {std::move(target), target_offset, nbytes, true});
            },
            "source"_a, "source_offset"_a, "target"_a, "target_offset"_a, "nbytes"_a)
        .def("cut", [](BoundRecorder& r) { r.open().cut(); })
        .def(
            "clear",
            [](BoundRecorder& r, std::shared_ptr<Memory> memory) { r.open().clear(std::move(memory)); },
            "memory"_a)
        .def(
            "post",
            [](BoundRecorder& r, std::shared_ptr<VulkanLink> link, int layer) {
                r.open().post(std::move(link), layer);
            },
            "link"_a, "layer"_a)
        .def(
            "collect",
            [](BoundRecorder& r, std::shared_ptr<VulkanLink> link, int layer) {
                r.open().collect(std::move(link), layer);
            },
            "link"_a, "layer"_a)
        .def("finish", &bind_finish);
    nb::class_<OpenDevice>(m, "VulkanDevice")
        .def(nb::init<int, std::optional<uint64_t>>(), "index"_a, "budget"_a.none() = nb::none(), Release())
        .def_prop_ro("info", [](OpenDevice& self) { return self.device->info(); })
        .def_prop_ro("allocated_bytes", [](OpenDevice& self) { return self.heap->allocated(); })
        .def_prop_ro("host_bytes", [](OpenDevice& self) { return self.heap->host_allocated(); })
        .def(
            "check_budget", [](OpenDevice& self) { self.heap->check_budget(); }, Release())
        .def(
            "allocate",
            [](OpenDevice& self, uint64_t nbytes, const std::string& where) {
                return self.heap->allocate(nbytes, where_of(where));
            },
            "nbytes"_a, "where"_a = "device", Release())
        .def("pipeline", &bind_pipeline, "spirv"_a, "ranges"_a, "push_bytes"_a, "constants"_a,
             "hardware_halves"_a = false)
        .def(
            "link",
            [](OpenDevice& self, double timeout_seconds, bool spin, std::shared_ptr<Pipeline> post,
               std::shared_ptr<Pipeline> wait) {
                return std::make_shared<VulkanLink>(self.heap, timeout_seconds, spin,
                                                    VulkanLink::Shaders{std::move(post), std::move(wait)});
            },
            "timeout_seconds"_a, "spin"_a, "post"_a, "wait"_a)
        .def("recorder", [](OpenDevice& self) { return BoundRecorder{Recorder(self.heap), {}}; })
        .def("write", &bind_write, "memory"_a, "offset"_a, "data"_exact)
        .def("read", &bind_read, "memory"_a, "offset"_a, "data"_exact)
        .def("clear", &bind_clear, "memory"_a);
#ifdef HOTCOLD_FAULTS
    nb::module_ faults = m.def_submodule("vulkan_faults");  // tests/support/vulkan/faults.py
    faults.def("fail", &fail_call, "function"_a, "nth"_a, "result"_a);
    faults.def("skip", &skip_call, "function"_a, "nth"_a);
    faults.def("calls", &calls);
    faults.def("forget_calls", &forget_calls);
    faults.def("set_patience", [](OpenDevice& open, double seconds) { open.device->set_patience(seconds); });
#endif
}

}  // namespace hc
