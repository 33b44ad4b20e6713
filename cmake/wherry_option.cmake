# wherry_require(name PACKAGE debian_package)
#   A CMake package no build can do without; its absence is one sentence.
#
# wherry_option(WHERRY_X "what it gives" probe)
#   Declares the cache variable WHERRY_X = AUTO | ON | OFF and decides WHERRY_HAS_X.
#   `probe` is a function that sets `found` and `reason` in its caller: with found, `reason` says
#   what was found; without, it is a sentence that names the package to install.
#   Every source sees WHERRY_HAS_X as 0 or 1; wherry_print_summary() and the generated
#   support/build_info.hpp give the reasons.

macro(wherry_require name)
  cmake_parse_arguments(require "" "PACKAGE" "" ${ARGN})
  find_package(${name} QUIET)
  if(NOT ${name}_FOUND)
    message(FATAL_ERROR "Wherry needs ${name}; install ${require_PACKAGE} "
                        "(scripts/install_packages.sh installs everything).")
  endif()
endmacro()

function(wherry_option name gives probe)
  set(${name} AUTO CACHE STRING "${gives}: AUTO, ON or OFF")
  set_property(CACHE ${name} PROPERTY STRINGS AUTO ON OFF)
  string(TOUPPER "${${name}}" asked)
  if(NOT asked STREQUAL "AUTO")
    if(asked MATCHES "^(ON|YES|TRUE|Y|1)$")
      set(asked ON)
    elseif(asked MATCHES "^(OFF|NO|FALSE|N|0)$")
      set(asked OFF)
    else()
      message(FATAL_ERROR "${name} is '${${name}}'; it may be AUTO, ON or OFF.")
    endif()
  endif()

  set(found FALSE)
  set(reason "switched off by ${name}=OFF")
  if(NOT asked STREQUAL "OFF")
    cmake_language(CALL ${probe})
  endif()
  if(asked STREQUAL "ON" AND NOT found)
    message(FATAL_ERROR "${name}=ON, but ${reason}.")
  endif()

  string(REPLACE "WHERRY_" "WHERRY_HAS_" has "${name}")
  if(found)
    set(${has} TRUE PARENT_SCOPE)
    add_compile_definitions(${has}=1)
  else()
    set(${has} FALSE PARENT_SCOPE)
    add_compile_definitions(${has}=0)
  endif()
  set_property(GLOBAL APPEND PROPERTY wherry_options ${name})
  set_property(GLOBAL PROPERTY wherry_option_${name}_asked "${asked}")
  set_property(GLOBAL PROPERTY wherry_option_${name}_found "${found}")
  set_property(GLOBAL PROPERTY wherry_option_${name}_gives "${gives}")
  set_property(GLOBAL PROPERTY wherry_option_${name}_reason "${reason}")
endfunction()

function(wherry_print_summary)
  message(STATUS "")
  message(STATUS "Wherry ${PROJECT_VERSION}, ${CMAKE_BUILD_TYPE}, "
                 "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}"
                 "${wherry_sanitize_words}")
  get_property(options GLOBAL PROPERTY wherry_options)
  foreach(name IN LISTS options)
    foreach(field IN ITEMS asked found gives reason)
      get_property(${field} GLOBAL PROPERTY wherry_option_${name}_${field})
    endforeach()
    if(found)
      set(state "yes")
    else()
      set(state "no ")
    endif()
    string(LENGTH "${name}" length)
    math(EXPR padding "20 - ${length}")
    string(REPEAT " " ${padding} spaces)
    message(STATUS "  ${state} ${name}${spaces} ${gives}: ${reason}")
  endforeach()
  message(STATUS "")
endfunction()
