// Makes torch accept fake CUDA tensors in autograd: answers of a CUDA runtime with one GPU, and a
// device guard that guards nothing. Loaded before torch, which asks for both once. A CUDA build
// registers its own: its hooks give way to those of a higher priority, but its guard replaces this
// one, so guard_cuda() puts it back after torch has been imported.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device kGpu{c10::DeviceType::CUDA, 0};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  // autograd would restore the device of an existing context
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return static_type; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return kGpu; }
  c10::Device exchangeDevice(c10::Device) const override { return kGpu; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, kGpu);
  }
  c10::Stream getNewStream(c10::Device, int) const override { return getStream(kGpu); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(kGpu); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
};

}  // namespace

namespace at {
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, ::Hooks)
}

extern "C" void guard_cuda() {
  static const Guard guard;
  c10::impl::DeviceGuardImplRegistrar(Guard::static_type, &guard);
}
