// stepwell._core.file_*: the file layer for the directory protocol. Failures are OSError with errno and path.
#include <fcntl.h>
#include <nanobind/stl/pair.h>

#include <cerrno>
#include <cstring>

#include "bind.h"
#include "file.h"
#include "recorder.h"

namespace stepwell::bind {
namespace {

// A path as os.fspath and the file system encoding give it.
std::string path_bytes(nb::handle path) {
  PyObject* converted = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), &converted) == 0) throw nb::python_error();
  const nb::object owner = nb::steal(converted);
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(converted, &data, &size) != 0) throw nb::python_error();
  return std::string(data, static_cast<size_t>(size));
}

// OSError itself picks the subclass that the errno stands for (FileNotFoundError, FileExistsError, ...).
[[noreturn]] void raise_os_error(int error, nb::handle path) {
  const nb::object instance = nb::handle(PyExc_OSError)(error, std::strerror(error), path);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(instance.ptr())), instance.ptr());
  throw nb::python_error();
}

int64_t checked(int64_t result, nb::handle path = nb::none()) {
  if (result < 0) raise_os_error(static_cast<int>(-result), path);
  return result;
}

// Runs a call of the file layer without the GIL.
template <typename Call>
int64_t released(Call call) {
  const GilRelease release;
  return call();
}

// Borrows the bytes of any contiguous buffer for the length of a call.
class BorrowedBytes {
 public:
  explicit BorrowedBytes(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  ~BorrowedBytes() { PyBuffer_Release(&view_); }
  BorrowedBytes(const BorrowedBytes&) = delete;
  BorrowedBytes& operator=(const BorrowedBytes&) = delete;
  const void* data() const noexcept { return view_.buf; }
  size_t size() const noexcept { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_;
};

int open_file(nb::object path, int flags, uint32_t mode) {
  const std::string name = path_bytes(path);
  return static_cast<int>(checked(released([&] { return file::open(name, flags, mode); }), path));
}

nb::bytes read_file(int fd, size_t nbytes, uint64_t offset) {
  std::vector<char> data(nbytes);
  const int64_t moved = checked(released([&] { return file::pread(fd, data.data(), nbytes, offset); }));
  return nb::bytes(data.data(), static_cast<size_t>(moved));
}

int64_t write_file(int fd, nb::object data, uint64_t offset) {
  const BorrowedBytes bytes(data);
  return checked(released([&] { return file::pwrite(fd, bytes.data(), bytes.size(), offset); }));
}

bool lock_file(int fd) {
  const int64_t result = released([&] { return file::lock(fd); });
  if (result == -EWOULDBLOCK) return false;
  checked(result);
  return true;
}

std::vector<std::string> list_names(const std::string& path, nb::handle shown) {
  std::vector<std::string> names;
  checked(released([&] { return file::list(path, &names); }), shown);
  return names;
}

nb::list list_directory(nb::object path) {
  nb::list decoded;
  for (const std::string& name : list_names(path_bytes(path), path)) {
    decoded.append(nb::steal(PyUnicode_DecodeFSDefaultAndSize(name.data(), static_cast<Py_ssize_t>(name.size()))));
  }
  return decoded;
}

FileStat stat_path(nb::object path) {
  const std::string name = path_bytes(path);
  FileStat status;
  checked(released([&] { return file::stat(name, &status); }), path);
  return status;
}

FileStat stat_descriptor(int fd) {
  FileStat status;
  checked(released([&] { return file::fstat(fd, &status); }));
  return status;
}

FileSystemStat stat_file_system(nb::object path) {
  const std::string name = path_bytes(path);
  FileSystemStat status;
  checked(released([&] { return file::statfs(name, &status); }), path);
  return status;
}

uint32_t alignment_of(nb::object path) {
  const std::string name = path_bytes(path);
  uint32_t alignment = 0;
  checked(released([&] { return file::direct_alignment(name, &alignment); }), path);
  return alignment;
}

int fileno_of(const Descriptor& descriptor) {
  if (!descriptor.valid())
    throw nb::value_error("the descriptor is closed, detached, or of the process that forked this one");
  return descriptor.get();
}

int detach(Descriptor& descriptor) {
  const int fd = fileno_of(descriptor);
  descriptor.release();
  return fd;
}

void bind_recorder(nb::module_& module) {
  nb::class_<recorder::Call>(module, "RecordedCall", "A call that changed a file or a name (csrc/recorder.h).")
      .def_prop_ro("kind", [](const recorder::Call& call) { return static_cast<int>(call.kind); })
      .def_prop_ro("file", [](const recorder::Call& call) { return std::pair(call.device, call.inode); })
      .def_prop_ro("path",
                   [](const recorder::Call& call) {
                     return nb::steal<nb::str>(
                         PyUnicode_DecodeFSDefaultAndSize(call.path.data(), static_cast<Py_ssize_t>(call.path.size())));
                   })
      .def_prop_ro("target",
                   [](const recorder::Call& call) {
                     return nb::steal<nb::str>(PyUnicode_DecodeFSDefaultAndSize(
                         call.target.data(), static_cast<Py_ssize_t>(call.target.size())));
                   })
      .def_ro("offset", &recorder::Call::offset)
      .def_prop_ro("data", [](const recorder::Call& call) { return nb::bytes(call.data.data(), call.data.size()); });
  module.def("record_start", &recorder::start, "Record the calls that change files from now on. For tests.");
  module.def("record_count", &recorder::count, "Count the calls recorded so far: a position in the log.");
  module.def("record_stop", &recorder::stop, "Stop, and return the log: a list of RecordedCall.");
}

}  // namespace

void bind_file(nb::module_& module) {
  bind_recorder(module);
  nb::class_<Descriptor>(module, "Descriptor", "Own one descriptor; a forked child finds it closed.")
      .def(nb::new_(&made_to_end_without_gil<Descriptor, int>), nb::arg("fd"))
      .def("fileno", &fileno_of, "Return the number. Raises ValueError once closed, detached, or in a forked child.")
      .def("detach", &detach, "Return the number and give up owning it; it stays registered for its next owner.")
      .def("close", &Descriptor::reset, nb::call_guard<GilRelease>(), "Close it, if it is open.")
      .def_prop_ro("closed", [](const Descriptor& descriptor) { return !descriptor.valid(); });

  nb::class_<FileStat>(module, "FileStat", "Describe a file, never followed through a symbolic link.")
      .def_ro("size", &FileStat::size)
      .def_ro("inode", &FileStat::inode)
      .def_ro("device", &FileStat::device)
      .def_ro("mode", &FileStat::mode)
      .def_ro("uid", &FileStat::uid)
      .def_ro("links", &FileStat::links)
      .def_ro("is_directory", &FileStat::is_directory)
      .def_ro("is_regular", &FileStat::is_regular)
      .def_ro("is_symlink", &FileStat::is_symlink);

  nb::class_<FileSystemStat>(module, "FileSystemStat", "Describe the file system that a path is on.")
      .def_ro("free_bytes", &FileSystemStat::free_bytes)
      .def_ro("total_bytes", &FileSystemStat::total_bytes)
      .def_ro("type", &FileSystemStat::type)
      .def_ro("is_network", &FileSystemStat::is_network);

  module.def("file_open", &open_file, nb::arg("path"), nb::arg("flags"), nb::arg("mode") = 0600,
             "Open a file, close-on-exec and never through a symbolic link; hand the result to a Descriptor.");
  module.def("file_close", [](int fd) { checked(released([&] { return file::close(fd); })); }, nb::arg("fd"));
  module.def("file_pread", &read_file, nb::arg("fd"), nb::arg("nbytes"), nb::arg("offset"),
             "Return up to nbytes bytes at offset; fewer at the end of the file.");
  module.def("file_pwrite", &write_file, nb::arg("fd"), nb::arg("data"), nb::arg("offset"),
             "Write a bytes-like object at offset; return how many bytes were written.");
  module.def(
      "file_truncate", [](int fd, uint64_t nbytes) { checked(released([&] { return file::truncate(fd, nbytes); })); },
      nb::arg("fd"), nb::arg("nbytes"));
  module.def(
      "file_reserve",
      [](int fd, uint64_t offset, uint64_t nbytes) {
        checked(released([&] { return file::reserve(fd, offset, nbytes); }));
      },
      nb::arg("fd"), nb::arg("offset"), nb::arg("nbytes"), "Allocate a range (fallocate).");
  module.def("file_sync", [](int fd) { checked(released([&] { return file::sync(fd); })); }, nb::arg("fd"));
  module.def(
      "file_sync_directory",
      [](nb::object path) {
        const std::string name = path_bytes(path);
        checked(released([&] { return file::sync_directory(name); }), path);
      },
      nb::arg("path"), "Make the names in a directory durable (fsync).");
  module.def("file_lock", &lock_file, nb::arg("fd"), "Take the file's flock; return False if another holds it.");
  module.def("file_unlock", [](int fd) { checked(released([&] { return file::unlock(fd); })); }, nb::arg("fd"));
  module.def(
      "file_rename",
      [](nb::object source, nb::object target) {
        const std::string from = path_bytes(source), to = path_bytes(target);
        checked(released([&] { return file::rename(from, to); }), source);
      },
      nb::arg("source"), nb::arg("target"));
  module.def(
      "file_unlink",
      [](nb::object path) {
        const std::string name = path_bytes(path);
        checked(released([&] { return file::unlink(name); }), path);
      },
      nb::arg("path"));
  module.def(
      "file_mkdir",
      [](nb::object path, uint32_t mode) {
        const std::string name = path_bytes(path);
        checked(released([&] { return file::make_directory(name, mode); }), path);
      },
      nb::arg("path"), nb::arg("mode") = 0700);
  module.def(
      "file_rmdir",
      [](nb::object path) {
        const std::string name = path_bytes(path);
        checked(released([&] { return file::remove_directory(name); }), path);
      },
      nb::arg("path"));
  module.def("file_list", &list_directory, nb::arg("path"), nb::sig("def file_list(path: object) -> list[str]"),
             "Return the names in a directory, sorted.");
  module.def("file_stat", &stat_path, nb::arg("path"));
  module.def("file_fstat", &stat_descriptor, nb::arg("fd"));
  module.def("file_statfs", &stat_file_system, nb::arg("path"));
  module.def("file_direct_alignment", &alignment_of, nb::arg("path"),
             "Return the direct-I/O alignment of a file in bytes; 0 where direct I/O is refused.");
}

}  // namespace stepwell::bind
