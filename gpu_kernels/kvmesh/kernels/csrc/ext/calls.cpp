// Kernel and Program: operations of the kernel library as Python objects that cost little to call.
//
// A Kernel is called with the operation's arguments (integers, floats, None for a null pointer) and returns its status,
// the GIL released meanwhile; a tenth of what ctypes takes. A Program records the calls that its thread makes and runs
// them again, with the same addresses, in one call.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <new>
#include <vector>

#include "../include/kvmesh_kernels.h"

namespace {

struct Call {
  const kvmesh_entry* entry;
  kvmesh_value arguments[KVMESH_MAX_ARGUMENTS];
};

thread_local std::vector<Call>* recording = nullptr;

struct Kernel {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  const kvmesh_entry* entry;
  Py_ssize_t count;
};

bool convert(PyObject* argument, char type, kvmesh_value& value) {
  if (type == 'f') {
    value.f = PyFloat_AsDouble(argument);
  } else if (argument == Py_None) {
    value.i = 0;
  } else {
    value.i = static_cast<int64_t>(PyLong_AsUnsignedLongLongMask(argument));
  }
  return !PyErr_Occurred();
}

PyObject* kernel_call(PyObject* self, PyObject* const* arguments, size_t flags, PyObject* names) {
  const Kernel* kernel = reinterpret_cast<Kernel*>(self);
  Py_ssize_t count = PyVectorcall_NARGS(flags);
  if (count != kernel->count || names != nullptr) {
    PyErr_Format(PyExc_TypeError, "%s takes %zd positional arguments, %zd given", kernel->entry->name, kernel->count, count);
    return nullptr;
  }
  Call call{kernel->entry, {}};
  for (Py_ssize_t i = 0; i < count; ++i)
    if (!convert(arguments[i], kernel->entry->signature[i], call.arguments[i])) return nullptr;
  if (recording != nullptr) {
    try {
      recording->push_back(call);
    } catch (const std::bad_alloc&) {
      return PyErr_NoMemory();
    }
  }
  int status;
  Py_BEGIN_ALLOW_THREADS
  status = call.entry->call(call.arguments);
  Py_END_ALLOW_THREADS
  return PyLong_FromLong(status);
}

PyObject* kernel_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  unsigned long long address;
  if (!PyArg_ParseTuple(arguments, "K", &address)) return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  Kernel* kernel = reinterpret_cast<Kernel*>(self);
  kernel->vectorcall = kernel_call;
  kernel->entry = reinterpret_cast<const kvmesh_entry*>(address);
  while (kernel->entry->signature[kernel->count] != 0) ++kernel->count;
  return self;
}

void free_object(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMemberDef kernel_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Kernel, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot kernel_slots[] = {
    {Py_tp_doc, const_cast<char*>("Kernel(entry_address)\n--\n\nAn operation of the kernel library.")},
    {Py_tp_new, reinterpret_cast<void*>(kernel_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(free_object)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, kernel_members},
    {0, nullptr},
};
PyType_Spec kernel_spec = {
    "kvmesh.kernels._native.Kernel", sizeof(Kernel), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_IMMUTABLETYPE, kernel_slots,
};

struct Program {
  PyObject_HEAD
  std::vector<Call>* calls;
};

PyObject* program_new(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  reinterpret_cast<Program*>(self)->calls = new (std::nothrow) std::vector<Call>;
  if (reinterpret_cast<Program*>(self)->calls == nullptr) {
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  return self;
}

void program_free(PyObject* self) {
  delete reinterpret_cast<Program*>(self)->calls;
  free_object(self);
}

PyObject* program_start(PyObject* self, PyObject*) {
  if (recording != nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "this thread is recording a program already");
    return nullptr;
  }
  recording = reinterpret_cast<Program*>(self)->calls;
  recording->clear();
  Py_RETURN_NONE;
}

PyObject* program_stop(PyObject* self, PyObject*) {
  if (recording != reinterpret_cast<Program*>(self)->calls) {
    PyErr_SetString(PyExc_RuntimeError, "this thread is not recording this program");
    return nullptr;
  }
  recording = nullptr;
  Py_RETURN_NONE;
}

PyObject* program_run(PyObject* self, PyObject*) {
  const std::vector<Call>& calls = *reinterpret_cast<Program*>(self)->calls;
  if (recording == &calls) {
    PyErr_SetString(PyExc_RuntimeError, "a program cannot run while it is recorded");
    return nullptr;
  }
  int status = 0;
  size_t index = 0;
  Py_BEGIN_ALLOW_THREADS
  for (; index < calls.size(); ++index) {
    status = calls[index].entry->call(calls[index].arguments);
    if (status != 0) break;
  }
  Py_END_ALLOW_THREADS
  if (status != 0) return Py_BuildValue("is", status, calls[index].entry->name);
  Py_RETURN_NONE;
}

Py_ssize_t program_length(PyObject* self) {
  return static_cast<Py_ssize_t>(reinterpret_cast<Program*>(self)->calls->size());
}

PyMethodDef program_methods[] = {
    {"start", program_start, METH_NOARGS, "Forget all calls and record those that this thread makes from now on."},
    {"stop", program_stop, METH_NOARGS, "End the recording."},
    {"run", program_run, METH_NOARGS, "Repeat the calls; returns None, or (status, operation) of the one that failed."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot program_slots[] = {
    {Py_tp_doc, const_cast<char*>("Program()\n--\n\nRecorded kernel calls.")},
    {Py_tp_new, reinterpret_cast<void*>(program_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(program_free)},
    {Py_tp_methods, program_methods},
    {Py_sq_length, reinterpret_cast<void*>(program_length)},
    {0, nullptr},
};
PyType_Spec program_spec = {
    "kvmesh.kernels._native.Program", sizeof(Program), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, program_slots,
};

}  // namespace

// Adds the two types to the module. Returns 0, or -1 with an exception set.
extern "C" int kvmesh_calls_init(PyObject* module) {
  for (PyType_Spec* spec : {&kernel_spec, &program_spec}) {
    PyObject* type = PyType_FromModuleAndSpec(module, spec, nullptr);
    if (type == nullptr) return -1;
    int status = PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type));
    Py_DECREF(type);
    if (status != 0) return -1;
  }
  return 0;
}
