// Every kernel against the reference, without Python, so that compute-sanitizer sees the kernels and little else:
//
//     selftest LIBKDTP.so PARAMS.h CASES.kdtr [SUBSTRING of the cases' names]
//
// Arrays are allocated to the byte, for memcheck. The workspace is never written before the kernel does: initcheck then
// sees a kernel that reads what it did not write. (Outputs and workspaces poisoned together: tests/gpu/test_cases.py.)
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <memory>

#include "compare.h"

namespace {

void must(cudaError_t code, const std::string& where) {
  if (code != cudaSuccess) die("%s: %s", where.c_str(), cudaGetErrorString(code));
}

// The library's entries, by name.
class Library {
 public:
  explicit Library(const char* path) : handle_(dlopen(path, RTLD_NOW)) {
    if (handle_ == nullptr) die("%s", dlerror());
  }

  template <typename Entry> Entry entry(const std::string& name) const {
    void* found = dlsym(handle_, name.c_str());
    if (found == nullptr) die("%s", dlerror());
    return reinterpret_cast<Entry>(found);
  }

  std::string text(const char* name) const { return entry<const char* (*)()>(name)(); }

 private:
  void* handle_;
};

// Device memory of exactly `size` bytes.
class Buffer {
 public:
  explicit Buffer(uint64_t size) : size_(size) { must(cudaMalloc(&data_, size > 0 ? size : 1), "cudaMalloc"); }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return data_; }
  void poison() { must(cudaMemset(data_, 0xFF, size_), "cudaMemset"); }
  void write(const std::vector<unsigned char>& from) {
    must(cudaMemcpy(data_, from.data(), size_, cudaMemcpyHostToDevice), "copy to the device");
  }
  std::vector<unsigned char> read() const {
    std::vector<unsigned char> data(size_);
    must(cudaMemcpy(data.data(), data_, size_, cudaMemcpyDeviceToHost), "copy from the device");
    return data;
  }

 private:
  uint64_t size_;
  void* data_ = nullptr;
};

// One array of a case, on the device: an input, or an output with what it must hold afterwards.
struct Operand {
  std::string field;
  const kdtr_array* array;
  bool output;
  std::unique_ptr<Buffer> buffer;
};

// A case's struct, as the words of its fields, and the arrays they point to.
class Call {
 public:
  Call(Cases& cases, uint64_t index, const std::vector<Field>& fields)
      : cases_(cases), prefix_(std::to_string(index) + "."), fields_(fields), words_(fields.size(), 0) {
    for (size_t i = 0; i < fields.size(); ++i) {
      const std::string& name = fields[i].name;
      if (fields[i].kind == Kind::kPointer) words_[i] = place(name);
      else if (name != "workspace_bytes") words_[i] = scalar(fields[i]);
    }
  }

  // Give the op the workspace that it asks for, if its struct has one.
  void provide_workspace(const Library& library, const std::string& op) {
    uint64_t* const pointer = word("workspace");
    if (pointer == nullptr) return;
    const auto need = library.entry<int64_t (*)(const void*)>("kdtp_" + op + "_workspace");
    const int64_t size = need(words_.data());
    if (size < 0) die("kdtp_%s_workspace: %lld bytes", op.c_str(), static_cast<long long>(size));
    workspace_ = std::make_unique<Buffer>(size);
    *pointer = reinterpret_cast<uint64_t>(workspace_->data());
    *word("workspace_bytes") = size;
  }

  const void* arguments() const { return words_.data(); }

  // What is wrong with the arrays, a line for each.
  std::string complaints() {
    std::string text;
    for (const Operand& operand : operands_) {
      const std::string found = operand.output ? check_output(operand) : check_input(operand);
      if (!found.empty()) text += "    " + operand.field + ": " + found + "\n";
    }
    return text;
  }

 private:
  uint64_t* word(const std::string& name) {
    for (size_t i = 0; i < fields_.size(); ++i)
      if (fields_[i].name == name) return &words_[i];
    return nullptr;
  }

  // The address of the field's array, filled as it must be before the call; 0 if the case has none.
  uint64_t place(const std::string& field) {
    const kdtr_array* const input = cases_.array(prefix_ + "in." + field);
    const kdtr_array* const output = cases_.array(prefix_ + "want." + field);
    const kdtr_array* const content = output ? cases_.array(prefix_ + "initial." + field) : input;
    const kdtr_array* const shape = output ? output : input;
    if (shape == nullptr) return 0;
    if (content && content->nbytes != shape->nbytes) die("%s: of another size than its result", content->name);
    operands_.push_back({field, shape, output != nullptr, std::make_unique<Buffer>(shape->nbytes)});
    Buffer& buffer = *operands_.back().buffer;
    if (content != nullptr) buffer.write(cases_.bytes(content));
    else buffer.poison();
    return reinterpret_cast<uint64_t>(buffer.data());
  }

  uint64_t scalar(const Field& field) const {
    const std::string key = prefix_ + "scalar." + field.name;
    const kdtr_value& value = cases_.value(key);
    if (field.kind == Kind::kInteger && value.kind != KDTR_INT) die("%s: not an int", key.c_str());
    if (field.kind == Kind::kInteger) return static_cast<uint64_t>(value.integer);
    const double real = cases_.real(key);
    uint64_t word;
    memcpy(&word, &real, sizeof word);
    return word;
  }

  std::string check_output(const Operand& operand) {
    const kdtr_array* const mask = cases_.array(prefix_ + "mask." + operand.field);
    return difference(operand.array, operand.buffer->read(), cases_.bytes(operand.array),
                      mask ? cases_.bytes(mask) : std::vector<unsigned char>(),
                      cases_.real(prefix_ + "atol." + operand.field), cases_.real(prefix_ + "rtol." + operand.field));
  }

  std::string check_input(const Operand& operand) {
    return operand.buffer->read() == cases_.bytes(operand.array) ? "" : "an input was changed";
  }

  Cases& cases_;
  const std::string prefix_;
  const std::vector<Field>& fields_;
  std::vector<uint64_t> words_;
  std::vector<Operand> operands_;
  std::unique_ptr<Buffer> workspace_;
};

// What is wrong with one case; empty if nothing is.
std::string run(const Library& library, Cases& cases, uint64_t index, const std::vector<Field>& fields) {
  const std::string name = cases.text(std::to_string(index) + ".name"), op = cases.text(std::to_string(index) + ".op");
  Call call(cases, index, fields);
  call.provide_workspace(library, op);
  const int code = library.entry<int (*)(const void*)>("kdtp_" + op)(call.arguments());
  if (code == -1) return "    refused: " + library.text("kdtp_error") + "\n";
  // A fault leaves the device unusable: no later case could tell anything.
  must(static_cast<cudaError_t>(code), name + ": launch");
  must(cudaDeviceSynchronize(), name);
  return call.complaints();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4 && argc != 5) die("usage: selftest LIBKDTP.so PARAMS.h CASES.kdtr [SUBSTRING]");
  const Library library(argv[1]);
  const auto structs = read_structs(argv[2]);
  Cases cases(argv[3]);
  if (cases.text("params") != library.text("kdtp_abi")) die("%s: made for another params.h than %s", argv[3], argv[1]);
  uint64_t passed = 0, failed = 0;
  for (int64_t i = 0; i < cases.value("cases").integer; ++i) {
    const std::string name = cases.text(std::to_string(i) + ".name"), op = cases.text(std::to_string(i) + ".op");
    if (argc == 5 && name.find(argv[4]) == std::string::npos) continue;
    if (structs.count(op) == 0) die("%s: op '%s' is not in %s", name.c_str(), op.c_str(), argv[2]);
    const std::string found = run(library, cases, i, structs.at(op));
    ++(found.empty() ? passed : failed);
    if (!found.empty()) printf("%s\n%s", name.c_str(), found.c_str());
  }
  printf("%llu passed, %llu failed\n", static_cast<unsigned long long>(passed), static_cast<unsigned long long>(failed));
  return failed > 0 || passed == 0;
}
