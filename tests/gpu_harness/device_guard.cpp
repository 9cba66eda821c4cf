// Tensors without data can say that they are on a GPU only if torch knows a device guard for it, and builds of torch for
// the CPU have none. This one does nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>

static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;

extern "C" void set_device_guard() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
}
