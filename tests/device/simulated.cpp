// A device that is not there, on torch's PrivateUse1. simulated.py says what it is like and loads it.
//
// Device memory is host memory. Every kernel is the CPU's, run on the thread of its stream, on raw addresses: like
// a real one it holds no tensor alive, and reads what is there when it gets there.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/ParallelGuard.h>
#include <dlfcn.h>
#include <sys/prctl.h>
#include <torch/library.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <random>
#include <thread>

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int POISON = 0xA5;
constexpr auto LONGEST_WAIT = std::chrono::seconds(50);  // Shorter than pytest's, which cannot interrupt it
constexpr double CATCH_UP_SECS = 2e-4;  // A thread sleeps a little too long; the link does not idle for it

double now_secs() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void sleep_until(double secs) {
  std::this_thread::sleep_until(std::chrono::steady_clock::time_point(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(secs))));
}

// -- streams and events ------------------------------------------------------------------------------

struct Settings {  // The same in simulated.py
  double bytes_per_sec, delay_secs, register_secs_per_gib;
  int64_t launch_queue, malloc_waits;
  int64_t total_bytes, others_bytes, refuse_registering, refuse_mallocs, pool, seed;
  int64_t allocated_bytes, peak_bytes, reserved_bytes, own_streams, synchronised;
  int64_t captures_ended, recorded, waits, transfers, pageable, malloc_retries, host_waits;
  uint64_t rng_seed, rng_offset;
} settings{INFINITY, 0.0, 0.0, 1024, 0, int64_t(8) << 30, 0, 0, 0, 3, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};

// A graph's capture, which calls of other threads end unless they have said that they do not look at it.
std::atomic<bool> capturing{false};
thread_local bool looks_away = false;

bool ends_capture() {
  if (!capturing || looks_away) return false;
  ++settings.captures_ended;
  return true;
}

void check_capture() { TORCH_CHECK(!ends_capture(), "operation not permitted when stream is capturing"); }

struct Point {  // Where an event was recorded
  bool timed;
  bool reached = false;
  double secs = 0.0;
};

struct Work {
  std::function<void()> run;
  std::function<bool()> ready;  // Whether it may run; none: at once
};

struct Queue {
  std::deque<Work> works;
  bool busy = false, ended = false;
  bool ready() const { return !busy && !works.empty() && (!works.front().ready || works.front().ready()); }
  bool idle() const { return !busy && works.empty(); }
};

struct KernelGuards {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::ParallelGuard serial{true};
};

thread_local c10::StreamId current_id = 0;
thread_local int64_t current_pool = 0;  // of the allocator; 0: the one that all share
thread_local bool on_stream = false;  // a stream's own thread never waits for a queue

// Lets go of Python's interpreter, if this thread holds it. This library is not linked to Python: the process has it.
struct WithoutInterpreter {
  void* state = nullptr;
  WithoutInterpreter() {
    static auto holds = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    static auto save = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    if (holds && save && holds()) state = save();
  }
  void restore() {
    static auto restore = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
    if (state) restore(std::exchange(state, nullptr));
  }
};

struct Streams {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<c10::StreamId, Queue> queues;  // 0: the default stream; up to `pool`: torch's
  std::vector<std::thread> threads;
  c10::StreamId newest = 1000;
  int64_t taken = 0;
  bool stopping = false;
  std::string error;  // Of a kernel. As of a real device it stays: nothing runs any more, and every call fails
  std::mt19937_64 order;
  double virtual_secs = 0.0;
  double link_free_secs[2] = {0.0, 0.0};  // When what was queued on the link has passed, by direction

  bool manual() const { return settings.seed >= 0; }
  double clock() { return manual() ? (virtual_secs += 1e-6) : now_secs(); }

  Queue& at(c10::StreamId id) {  // With the lock
    auto found = queues.find(id);
    if (found == queues.end()) {
      found = queues.try_emplace(id).first;
      threads.emplace_back([this, queue = &found->second] { serve(*queue); });
    }
    return found->second;
  }

  bool lost() {
    std::lock_guard lock(mutex);
    return !error.empty();
  }

  void check() {
    std::lock_guard lock(mutex);
    TORCH_CHECK(error.empty(), "the simulated device failed: ", error);
  }

  // A host that is ahead by as many launches as the queue takes waits for the device. Never throws: destructors call it.
  void put(c10::StreamId id, std::function<void()> run, std::function<bool()> ready = {}) {
    std::unique_lock lock(mutex);
    Queue* queue = &at(id);
    if (!manual() && !on_stream)
      wait_without_interpreter(lock, [&] { return stopping || int64_t(queue->works.size()) < settings.launch_queue; });
    if (queue->ended) {  // also by the allocator, for a block that was allocated on it
      if (error.empty()) error = "invalid resource handle: the stream was destroyed";
      queue = &at(0);
    }
    queue->works.push_back({std::move(run), std::move(ready)});
    changed.notify_all();
  }

  void serve(Queue& queue) {
    KernelGuards guards;
    on_stream = true;
    prctl(PR_SET_TIMERSLACK, 1000UL);
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return stopping || queue.ended || (!manual() && may_run(queue)); });
      if (stopping || (queue.ended && queue.works.empty())) return;
      if (may_run(queue)) run_next(queue, lock);
      else if (queue.ended) changed.wait_for(lock, std::chrono::milliseconds(1));
    }
  }

  void run_next(Queue& queue, std::unique_lock<std::mutex>& lock) {
    Work work = std::move(queue.works.front());
    queue.works.pop_front();
    queue.busy = true;
    const bool lost = !error.empty();
    lock.unlock();
    std::string failed;
    try {
      if (!lost) work.run();
    } catch (const std::exception& e) {
      failed = e.what();
    }
    work = {};
    lock.lock();
    if (error.empty()) error = failed;
    queue.busy = false;
    changed.notify_all();
  }

  // By hand: one of the works that may run now, drawn from the seed. Returns whether there was one.
  bool step(std::unique_lock<std::mutex>& lock) {
    std::vector<Queue*> ready;
    for (auto& [id, queue] : queues)
      if (may_run(queue)) ready.push_back(&queue);
    if (ready.empty()) return false;
    run_next(*ready[order() % ready.size()], lock);
    return true;
  }

  void wait(const std::function<bool()>& over) {
    std::unique_lock lock(mutex);
    if (manual()) {
      KernelGuards guards;
      while (error.empty() && !over()) TORCH_CHECK(step(lock), "the host waits for the simulated device for ever");
    } else {
      auto came = [&] { return stopping || !error.empty() || over(); };
      if (!came()) ++settings.host_waits;
      wait_without_interpreter(lock, came);
      TORCH_CHECK(came(), "the host has waited too long for the simulated device: a stream is held, or waits for ever");
    }
    TORCH_CHECK(error.empty(), "the simulated device failed: ", error);
  }

  void fail(const char* said) {
    std::lock_guard lock(mutex);
    if (error.empty()) error = said;
    changed.notify_all();
  }

  // As a new process would find the device.
  void recover() {
    std::vector<std::deque<Work>> dropped;  // Destroyed without the lock: tensors are given back
    std::unique_lock lock(mutex);
    if (error.empty()) return;
    auto busy = [](auto& item) { return item.second.busy; };
    wait_without_interpreter(lock, [&] { return std::none_of(queues.begin(), queues.end(), busy); });
    for (auto& [id, queue] : queues) dropped.push_back(std::exchange(queue.works, {}));
    error.clear();
  }

  // Work of a device that has failed is dropped, whatever it waits for.
  bool may_run(const Queue& queue) const {
    return queue.ready() || (!error.empty() && !queue.busy && !queue.works.empty());
  }

  // A stream may have to run Python to go on.
  template <typename Over>
  void wait_without_interpreter(std::unique_lock<std::mutex>& lock, Over over) {
    if (over()) return;
    lock.unlock();
    WithoutInterpreter released;
    lock.lock();
    changed.wait_for(lock, LONGEST_WAIT, over);
    lock.unlock();
    released.restore();
    lock.lock();
  }

  std::shared_ptr<Point> record(c10::StreamId id, bool timed) {
    auto point = std::make_shared<Point>();
    point->timed = timed;
    put(id, [this, point] {
      std::lock_guard lock(mutex);
      point->secs = clock();
      point->reached = true;
    });
    return point;
  }

  void wait_for(c10::StreamId id, std::shared_ptr<Point> point) {
    put(id, [] {}, [point] { return point->reached; });
  }

  void synchronise(c10::StreamId id) {
    auto point = record(id, false);
    wait([&] { return point->reached; });
  }

  bool idle() {  // With the lock
    return std::all_of(queues.begin(), queues.end(), [](auto& item) { return item.second.idle(); });
  }
};

Streams& streams = *new Streams;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, 0), id); }
  static std::shared_ptr<Point>& point(void* event) { return *static_cast<std::shared_ptr<Point>*>(event); }

  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {KIND, 0}; }
  void setDevice(c10::Device device) const override { TORCH_CHECK(device.index() <= 0, "there is one device"); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(current_id); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStreamFromGlobalPool(device, false); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    std::lock_guard lock(streams.mutex);
    return stream(1 + streams.taken++ % settings.pool);
  }
  c10::Stream exchangeStream(c10::Stream next) const override { return stream(std::exchange(current_id, next.id())); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete &point(event); }
  void record(void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag flag) const override {
    streams.check();
    if (*event == nullptr) *event = new std::shared_ptr<Point>;
    ++settings.recorded;
    point(*event) = streams.record(on.id(), flag == c10::EventFlag::BACKEND_DEFAULT);
  }
  void block(void* event, const c10::Stream& on) const override {
    streams.check();
    ++settings.waits;
    if (event != nullptr) streams.wait_for(on.id(), point(event));
  }
  bool queryEvent(void* event) const override {
    check_capture();
    streams.check();
    std::lock_guard lock(streams.mutex);
    return event == nullptr || point(event)->reached;
  }
  void synchronizeEvent(void* event) const override {
    check_capture();
    if (event != nullptr) streams.wait([at = point(event)] { return at->reached; });
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    std::lock_guard lock(streams.mutex);
    TORCH_CHECK_VALUE(first && second && point(first)->timed && point(second)->timed, "both must be timed and recorded");
    TORCH_CHECK(point(first)->reached && point(second)->reached, "device not ready");
    return (point(second)->secs - point(first)->secs) * 1e3;
  }
  bool queryStream(const c10::Stream& on) const override {
    streams.check();
    std::lock_guard lock(streams.mutex);
    return streams.at(on.id()).idle();
  }
  void synchronizeStream(const c10::Stream& on) const override { streams.synchronise(on.id()); }
  void synchronizeDevice(c10::DeviceIndex) const override {
    streams.wait([] { return streams.idle(); });
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// -- memory ------------------------------------------------------------------------------------------

struct Block {
  void* memory;
  size_t nbytes;
  int64_t pool;
  c10::StreamId owner;  // On which it was allocated: it is given out again there, at once
  std::vector<c10::StreamId> recorded;  // Other streams that said they use it
};

struct Memory final : c10::Allocator {
  std::mutex mutex;
  std::multimap<std::tuple<int64_t, c10::StreamId, size_t>, Block*> given_back;  // by pool and owner

  c10::DataPtr allocate(size_t wanted) override {
    c10::Device device(KIND, 0);
    if (wanted == 0) return {nullptr, device};
    size_t nbytes = (wanted + 511) / 512 * 512;
    Block* block = nullptr;
    {
      std::lock_guard lock(mutex);
      auto found = given_back.lower_bound({current_pool, current_id, nbytes});
      if (found != given_back.end() && found->first < std::tuple(current_pool, current_id, 2 * nbytes + 1)) {
        block = found->second;
        given_back.erase(found);
      }
    }
    if (block == nullptr) block = fresh(nbytes);
    std::lock_guard lock(mutex);
    settings.allocated_bytes += block->nbytes;
    settings.peak_bytes = std::max(settings.peak_bytes, settings.allocated_bytes);
    return {block->memory, block, &Memory::give_back, device};
  }

  Block* fresh(size_t nbytes) {
    check_capture();
    auto fits = [&] {
      return settings.reserved_bytes + settings.others_bytes + int64_t(nbytes) <= settings.total_bytes;
    };
    auto granted = [&] { return settings.refuse_mallocs > 0 ? (--settings.refuse_mallocs, false) : fits(); };
    streams.check();
    if (settings.malloc_waits) streams.wait([] { return streams.idle(); });  // as drivers may, for what is new
    bool found = granted();
    if (!found) {  // as torch's allocator: everything cached is given back, training's too, and it is tried once more
      ++settings.malloc_retries;
      empty_cache();
      found = granted();
    }
    TORCH_CHECK_WITH(OutOfMemoryError, found, "the simulated device is out of memory: ", nbytes, " bytes are wanted");
    auto* block = new Block{aligned_alloc(512, nbytes), nbytes, current_pool, current_id, {}};
    {
      std::lock_guard lock(mutex);
      settings.reserved_bytes += nbytes;
    }
    poison(block);
    return block;
  }

  // Give what is cached back to the driver: of one pool, or of all.
  void empty_cache(std::optional<int64_t> pool = {}) {
    auto is_of_pool = [&](auto& item) { return !pool || *pool == item.second->pool; };
    {
      std::lock_guard lock(mutex);  // An empty pool may end at any time: nothing waits for the device
      if (pool && std::none_of(given_back.begin(), given_back.end(), is_of_pool)) return;
    }
    streams.wait([] { return streams.idle(); });
    std::lock_guard lock(mutex);
    std::erase_if(given_back, [&](auto& item) {
      auto* block = item.second;
      if (!is_of_pool(item)) return false;
      settings.reserved_bytes -= block->nbytes;
      free(block->memory);
      delete block;
      return true;
    });
  }

  static void poison(Block* block) {
    streams.put(block->owner, [memory = block->memory, n = block->nbytes] { memset(memory, POISON, n); });
  }

  static void give_back(void* context);
  void copy_data(void* target, const void* source, size_t n) const override;
};

Memory& memory = *new Memory;

void Memory::give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  for (auto id : block->recorded) streams.wait_for(block->owner, streams.record(id, false));
  block->recorded.clear();
  poison(block);
  std::lock_guard lock(memory.mutex);
  settings.allocated_bytes -= block->nbytes;
  memory.given_back.emplace(std::tuple(block->pool, block->owner, block->nbytes), block);
}

void Memory::copy_data(void* target, const void* source, size_t n) const {
  streams.put(current_id, [=] { memcpy(target, source, n); });
}

REGISTER_ALLOCATOR(KIND, &memory)

// Host memory that the driver knows: ranges by their begin.
std::mutex registered_mutex;
std::map<uintptr_t, size_t> registered;

constexpr int INVALID_VALUE = 1, LOST = 700, CAPTURING = 900, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713;  // As CUDA's

// Whether a range is registered. One that is so in part, or over two registrations, is refused, as by the driver.
bool is_registered(uintptr_t begin, size_t nbytes) {
  std::lock_guard lock(registered_mutex);
  auto next = registered.upper_bound(begin);
  if (next != registered.begin()) {
    auto [at, length] = *std::prev(next);
    if (begin < at + length) {
      TORCH_CHECK(begin + nbytes <= at + length, "invalid argument: a copy over the end of registered memory");
      return true;
    }
  }
  TORCH_CHECK(next == registered.end() || begin + nbytes <= next->first, "invalid argument: a copy into registered memory");
  return false;
}

int host_register(uintptr_t begin, size_t nbytes) {
  if (ends_capture()) return CAPTURING;
  if (streams.lost()) return LOST;
  sleep_until(now_secs() + settings.register_secs_per_gib * double(nbytes) / double(1 << 30));
  std::lock_guard lock(registered_mutex);
  if (settings.refuse_registering || nbytes == 0) return INVALID_VALUE;
  auto next = registered.lower_bound(begin);
  if (next != registered.end() && next->first < begin + nbytes) return ALREADY_REGISTERED;
  if (next != registered.begin() && std::prev(next)->first + std::prev(next)->second > begin) return ALREADY_REGISTERED;
  registered[begin] = nbytes;
  return 0;
}

int host_unregister(uintptr_t begin) {
  if (ends_capture()) return CAPTURING;
  if (streams.lost()) return LOST;
  std::lock_guard lock(registered_mutex);
  return registered.erase(begin) ? 0 : NOT_REGISTERED;
}

struct Pinned final : at::HostAllocator {  // torch's pinned tensors; given back to the system when nothing runs
  std::mutex mutex;
  std::vector<void*> dropped;
  c10::DataPtr allocate(size_t n) override {
    {
      std::scoped_lock lock(mutex, streams.mutex);
      if (streams.idle()) {
        for (void* address : dropped) free(address);
        dropped.clear();
      }
    }
    if (n == 0) return {nullptr, c10::Device(c10::kCPU)};
    void* address = aligned_alloc(4096, (n + 4095) / 4096 * 4096);
    host_register(uintptr_t(address), n);
    return {address, address, &Pinned::drop, c10::Device(c10::kCPU)};
  }
  static void drop(void* address);
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  void copy_data(void* target, const void* source, size_t n) const override { memcpy(target, source, n); }
};

Pinned& pinned = *new Pinned;

void Pinned::drop(void* address) {
  host_unregister(uintptr_t(address));
  std::lock_guard lock(pinned.mutex);
  pinned.dropped.push_back(address);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard lock(registered_mutex);
    auto next = registered.upper_bound(uintptr_t(data));
    return next != registered.begin() && uintptr_t(data) < std::prev(next)->first + std::prev(next)->second;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto bigger = memory.allocate(nbytes);
    if (size_t kept = std::min(nbytes, storage.nbytes())) memory.copy_data(bigger.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(bigger));
    storage.set_nbytes(nbytes);
  }
};

// -- kernels -----------------------------------------------------------------------------------------

// The bytes of a tensor of the device as the CPU's kernels take them; holds nothing.
Tensor bytes_of(const Tensor& tensor) {
  auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto same = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  same._set_conj(tensor.is_conj());
  same._set_neg(tensor.is_neg());
  return same;
}

// What a kernel is given: a tensor of the host is one that it takes the value of now.
Tensor for_kernel(const Tensor& tensor) {
  if (tensor.device().type() == KIND) return bytes_of(tensor);
  auto value = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) value.unsafeGetTensorImpl()->set_wrapped_number(true);
  return value;
}

Tensor for_shapes(const Tensor& tensor) {
  if (tensor.device().type() != KIND && tensor.dim() == 0) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta).requires_grad(false));
}

Tensor like(const Tensor& shape) {
  return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(c10::Device(KIND, 0)));
}

IValue mapped(const IValue& value, const std::function<Tensor(const Tensor&)>& of, c10::Device device) {
  auto if_defined = [&](const Tensor& tensor) { return tensor.defined() ? of(tensor) : tensor; };
  if (value.isTensor()) return if_defined(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(if_defined(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor.has_value() ? std::optional(if_defined(*tensor)) : std::nullopt);
    return list;
  }
  return value.isDevice() ? IValue(device) : value;
}

// Random numbers are drawn as on a GPU: seed and offset are the host's, the numbers the kernel's.
at::Generator next_generator() {
  uint64_t x = settings.rng_seed + 0x9E3779B97F4A7C15ULL * ++settings.rng_offset;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  return at::detail::createCPUGenerator(x ^ (x >> 27));
}

// Every operator without a kernel of its own: queues the CPU's, and returns tensors that it will have written. What
// has no shape before it has run holds the host up, and is counted.
void queue_kernel(const c10::OperatorHandle& op, Stack* stack) {
  streams.check();
  const auto& schema = op.schema();
  const auto& formal = schema.arguments();
  auto given = torch::jit::pop(*stack, formal.size());
  Stack kernel_args, shape_args;
  for (size_t i = 0; i < formal.size(); ++i) {
    kernel_args.push_back(mapped(given[i], for_kernel, c10::kCPU));
    shape_args.push_back(mapped(given[i], for_shapes, c10::kMeta));
    if (formal[i].type()->str().find("Generator") != std::string::npos) {
      kernel_args.back() = next_generator();
      shape_args.back() = IValue();
    }
  }
  std::vector<int> argument_of;  // For each result the argument that it is; -1: a new tensor
  bool is_new = false;
  for (const auto& result : schema.returns()) {
    int at = -1;
    if (result.alias_info() != nullptr) {
      TORCH_CHECK_NOT_IMPLEMENTED(result.alias_info()->isWrite(), "the simulated device has no view ", op.operator_name());
      for (size_t i = 0; i < formal.size(); ++i)
        if (formal[i].alias_info() && *formal[i].alias_info() == *result.alias_info()) at = int(i);
    }
    argument_of.push_back(at);
    is_new |= at < 0;
    if (at >= 0 && given[at].isTensor() && given[at].toTensor().numel() == 0) is_new = true;  // may be resized
  }
  Stack results;
  bool shaped = true;
  if (is_new) {
    try {
      at::AutoDispatchBelowADInplaceOrView guard;
      op.callBoxed(&shape_args);
      for (size_t i = 0; i < argument_of.size() && shaped; ++i) {
        const auto& shape = shape_args[i];
        if (argument_of[i] >= 0) {
          auto out = given[argument_of[i]].toTensor();
          if (out.sizes() != shape.toTensor().sizes()) out.resize_(shape.toTensor().sizes());
          kernel_args[argument_of[i]] = for_kernel(out);
        }
        shaped = shape.isTensor() || shape.isTensorList();
      }
    } catch (const std::exception&) {
      shaped = false;
    }
  }
  for (size_t i = 0; i < argument_of.size() && shaped; ++i)
    results.push_back(argument_of[i] >= 0 ? given[argument_of[i]] : mapped(shape_args[i], like, c10::Device(KIND, 0)));
  Stack targets;
  for (const auto& result : results) targets.push_back(mapped(result, bytes_of, c10::kCPU));
  auto written = std::make_shared<Stack>();
  streams.put(current_id, [=]() mutable {
    op.callBoxed(&kernel_args);
    *written = kernel_args;
    auto copy = [](const Tensor& target, const Tensor& made) {
      if (target.defined() && made.defined() && target.numel()) target.copy_(made);
    };
    for (size_t i = 0; i < targets.size(); ++i) {
      if (argument_of[i] >= 0) {
        bool moved = targets[i].isTensor() && targets[i].toTensor().data_ptr() != kernel_args[i].toTensor().data_ptr();
        TORCH_CHECK(!moved, op.operator_name(), " resized what it writes to");
      } else if (targets[i].isTensor()) {
        copy(targets[i].toTensor(), kernel_args[i].toTensor());
      } else {
        auto made = kernel_args[i].toTensorVector(), into = targets[i].toTensorVector();
        for (size_t k = 0; k < into.size(); ++k) copy(into[k], made[k]);
      }
    }
    kernel_args.clear();
  });
  if (!shaped) {
    ++settings.synchronised;
    streams.synchronise(current_id);
    auto on_device = [](const Tensor& made) {
      auto out = like(made);
      streams.synchronise(current_id);  // the poison
      bytes_of(out).copy_(made);
      return out;
    };
    for (size_t i = 0; i < argument_of.size(); ++i)
      results.push_back(argument_of[i] >= 0 ? given[argument_of[i]] : mapped((*written)[i], on_device, c10::Device(KIND, 0)));
  }
  for (auto& result : results) stack->push_back(std::move(result));
}

// Over the link, in two halves: what changes while it is under way arrives torn. `pinned`: memory of the host that
// has to stay registered until then.
void transfer(void* target, const void* source, size_t nbytes, bool to_host, const void* pinned = nullptr) {
  ++settings.transfers;
  auto half = [=](size_t begin, size_t end, double delay_secs) {
    return [=] {
      TORCH_CHECK(!pinned || is_registered(uintptr_t(pinned), nbytes), "memory was unregistered under a copy");
      double until = 0.0;
      if (!streams.manual()) {
        std::lock_guard lock(streams.mutex);
        double& link = streams.link_free_secs[to_host];
        link = std::max(link, now_secs() - CATCH_UP_SECS) + delay_secs + (end - begin) / settings.bytes_per_sec;
        until = link;
      }
      memcpy(static_cast<char*>(target) + begin, static_cast<const char*>(source) + begin, end - begin);
      if (until > now_secs()) sleep_until(until);
    };
  };
  size_t middle = nbytes / 2;
  streams.put(current_id, half(0, middle, settings.delay_secs));
  streams.put(current_id, half(middle, nbytes, 0.0));
}

Tensor copy_from(const Tensor& from, const Tensor& target, bool non_blocking) {
  auto source = from.sizes() == target.sizes() ? from : from.expand_as(target);
  streams.check();
  if (target.numel() == 0) return target;
  bool to_host = target.device().type() != KIND, from_host = source.device().type() != KIND;
  if (!to_host && !from_host) {
    streams.put(current_id, [into = bytes_of(target), made = bytes_of(source)]() mutable { into.copy_(made); });
    return target;
  }
  auto plain = source.to(target.scalar_type()).resolve_conj().resolve_neg().contiguous();
  if (!target.is_contiguous() || target.is_conj() || target.is_neg()) {
    auto between = at::empty_like(plain, target.options(), at::MemoryFormat::Contiguous);
    copy_from(plain, between, false);
    target.copy_(between);
    return target;
  }
  const Tensor& host = to_host ? target : plain;
  bool at_once = is_registered(uintptr_t(host.data_ptr()), host.nbytes()) && non_blocking;
  transfer(target.data_ptr(), plain.data_ptr(), target.nbytes(), to_host, at_once ? host.data_ptr() : nullptr);
  if (!at_once) {
    ++settings.pageable;
    streams.synchronise(current_id);
  }
  return target;
}

at::Scalar value_of(const Tensor& tensor) {
  transfer(nullptr, nullptr, 0, true);
  streams.synchronise(current_id);
  return bytes_of(tensor).item();
}

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto type = dtype.value_or(c10::get_default_dtype_as_scalartype());
  return at::detail::empty_generic(sizes, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type, format);
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  auto type = dtype.value_or(c10::get_default_dtype_as_scalartype());
  return at::detail::empty_strided_generic(sizes, strides, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}

const Tensor& resize(const Tensor& tensor, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  size_t wanted = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (wanted > impl->storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(impl->storage(), wanted);
  return tensor;
}

void record_stream(Tensor& tensor, at::Stream stream) {
  auto* block = static_cast<Block*>(tensor.storage().data_ptr().get_context());
  if (block != nullptr && stream.id() != block->owner) block->recorded.push_back(stream.id());
}

Tensor& sqrt_out(const Tensor& input, Tensor& out) {  // Correctly rounded, as on devices; the CPU's comes from MKL
  streams.put(current_id, [into = bytes_of(out), from = bytes_of(input)]() mutable {
    into.copy_(from.to(at::kDouble).sqrt_());
  });
  return out;
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1.0 - p);
  return {input.mul(mask).mul(p < 1.0 ? 1.0 / (1.0 - p) : 0.0), mask};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&queue_kernel>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", value_of);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
  m.impl("sqrt.out", sqrt_out);
}

bool registered_with_torch = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  at::setHostAllocator(KIND, &pinned);
  return true;
}();

std::map<int64_t, std::shared_ptr<bool>>& holds = *new std::map<int64_t, std::shared_ptr<bool>>;
int64_t newest_hold = 0;

}  // namespace

// -- for simulated.py, by ctypes ---------------------------------------------------------------------

extern "C" {

Settings* sim_settings() { return &settings; }

int sim_host_register(uintptr_t address, size_t nbytes) { return host_register(address, nbytes); }
int sim_host_unregister(uintptr_t address) { return host_unregister(address); }
int64_t sim_registered() {
  std::lock_guard lock(registered_mutex);
  return int64_t(registered.size());
}

void sim_forget_registered() {
  std::lock_guard lock(registered_mutex);
  registered.clear();
}

int64_t sim_create_stream() {
  std::lock_guard lock(streams.mutex);
  ++settings.own_streams;
  streams.at(++streams.newest);
  return streams.newest;
}

void sim_destroy_stream(int64_t id) {
  std::lock_guard lock(streams.mutex);
  --settings.own_streams;
  streams.at(id).ended = true;
  streams.changed.notify_all();
}

void sim_capture(int64_t begins) { capturing = begins; }
void sim_look_away() { looks_away = true; }

void sim_sleep(double secs) {
  streams.put(current_id, [secs] { if (!streams.manual()) std::this_thread::sleep_for(std::chrono::duration<double>(secs)); });
}

void sim_launch(void (*call)()) { streams.put(current_id, call); }

int64_t sim_hold(int64_t stream) {
  auto let_go = std::make_shared<bool>(false);
  streams.put(stream, [] {}, [let_go] { return *let_go; });
  std::lock_guard lock(streams.mutex);
  holds[++newest_hold] = let_go;
  return newest_hold;
}

void sim_release(int64_t number) {  // 0: all
  std::lock_guard lock(streams.mutex);
  for (auto& [at, let_go] : holds)
    if (number == 0 || at == number) *let_go = true;
  streams.changed.notify_all();
}

void sim_set_seed(int64_t seed) {
  std::lock_guard lock(streams.mutex);
  settings.seed = seed;
  streams.order.seed(uint64_t(seed));
  streams.changed.notify_all();
}

void sim_progress(int64_t most) {
  KernelGuards guards;
  std::unique_lock lock(streams.mutex);
  for (int64_t count = streams.order() % uint64_t(most + 1); count > 0 && streams.step(lock); --count) {}
}

const char* sim_synchronise() {  // What a kernel died of, if one did
  static thread_local std::string said;
  said.clear();
  try {
    streams.wait([] { return streams.idle(); });
  } catch (const std::exception& e) {
    said = e.what();
  }
  return said.c_str();
}

void sim_fail(const char* said) { streams.fail(said); }
void sim_recover() { streams.recover(); }
int64_t sim_use_pool(int64_t pool) { return std::exchange(current_pool, pool); }
void sim_empty_cache(int64_t pool) {  // -1: of all pools. What a device that has failed keeps is lost
  try {
    memory.empty_cache(pool < 0 ? std::nullopt : std::optional(pool));
  } catch (const std::exception&) {
  }
}

void sim_stop() {
  {
    std::lock_guard lock(streams.mutex);
    streams.stopping = true;
    streams.changed.notify_all();
  }
  for (auto& thread : streams.threads) thread.join();
  streams.threads.clear();
}

}  // extern "C"
